"""Figure 12: bubbles and completions of GPT-3 on 64 A100s: Orca's best case, SARATHI and tensor parallelism alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...conf.policies import (
    EqualTimeConfig,
    OrcaBestConfig,
    OrcaWorstConfig,
    RequestLevelConfig,
    SchedulerConfig,
    TokenBudgetConfig,
)
from ...conf.schema import SimulateConfig
from ...models.memory import BYTES, MemoryModel
from ..drawing.chart import Axis, Chart, Series, series_colour
from ..drawing.distributions import Quantity, cdf
from ..drawing.formatting import time_unit
from ..drawing.thinning import thin
from ..engine.plan import make_plan
from ..ledger.causes import BUBBLES, CAUSES, UNEVEN_WORK, Cause
from ..simulation.make_costs import make_costs
from .artifact import Artifact, Row, Simulate, markdown_table, number
from .bound import bubble_free_seconds
from .outcome import RunOutcome, outcome_of

NAME = "Figure 12"
ORCA, SARATHI, TENSOR, EQUAL = "TP-PP Orca", "TP-PP SARATHI", "TP-only", "TP-PP equal_time"
TENSOR_BATCH = 11  # B of a replica with eight tensor-parallel ranks (5.3)
TENSOR_REPLICAS = 8
STATED = "as stated"

# Host time of a vLLM-like engine per iteration, in milliseconds: medians for Llama-2-70B on four A100s at 24 requests
# (microsoft/vidur's CPU overheads, MIT). BEFORE schedules and makes the batch, AFTER handles its outputs, and RAY is
# what passing each micro-batch through Ray adds (a mean).
BEFORE, AFTER, RAY = 0.404 + 0.853, 0.535, 6.782

FEWER_REQUESTS = 2000  # maximum number of requests in the runs that vary a parameter
# Orca with any number of whole prompts in a micro-batch (4.5), its worst case, FasterTransformer.
OTHER_BASELINES: Mapping[str, SchedulerConfig] = {
    "Orca, any number of prompts": TokenBudgetConfig(budget=1 << 30),
    "Orca's worst case": OrcaWorstConfig(),
    "request-level": RequestLevelConfig(),
}
# Parameters that the paper does not state, varied one at a time.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    f"host turnaround of {BEFORE + AFTER:.1f} ms": {"dispatch_ms": BEFORE, "result_ms": AFTER},
    f"steps through Ray, {BEFORE + RAY + AFTER:.1f} ms": {"dispatch_ms": BEFORE + RAY, "result_ms": AFTER},
    "host overhead of layers and stages": {"host": True},
    "sends not sharded over the ranks": {"scatter_gather": False},
    "sends not sharded, and a stage waits for them": {"scatter_gather": False, "overlap_sends": False},
}
# Each ratio: the quantity, the paper's number, the system above and the system below.
RATIOS = (
    ("median bubble time: Orca / SARATHI", 6.29, ORCA, SARATHI),
    ("makespan: Orca / SARATHI", 1.91, ORCA, SARATHI),
    ("makespan: TP-only / SARATHI", 1.48, TENSOR, SARATHI),
    ("makespan: Orca / TP-only", 1.28, ORCA, TENSOR),
)


def figure12(config: SimulateConfig, simulate: Simulate) -> Artifact:
    """Simulate the paper's systems with the stated parameters, then vary others one at a time, over fewer requests.

    The policy `equal_time` and the lower bound of the makespan are reported beside them.
    """
    seen: dict[SimulateConfig, RunOutcome] = {}

    def outcome(varied: SimulateConfig, name: str) -> RunOutcome:
        if varied not in seen:
            seen[varied] = outcome_of(simulate(varied, name))
        return seen[varied]

    ours = {name: outcome(each, name) for name, each in systems(config).items()}
    few = replace(config, workload=replace(config.workload, num_prompts=min(FEWER_REQUESTS, len(ours[SARATHI].inputs))))
    by_variant: dict[str, dict[str, RunOutcome]] = {}
    for variant, keys in {STATED: {}, **VARIANTS, "all of these": _all(VARIANTS)}.items():
        changed = systems(replace(few, simulation=replace(config.simulation, **keys)))
        by_variant[variant] = {name: outcome(changed[name], f"{name}, {variant}") for name in (ORCA, SARATHI, TENSOR)}
    batch = config.scheduler.batch
    others = {
        name: outcome(replace(few, scheduler=replace(policy, batch=batch)), name)
        for name, policy in OTHER_BASELINES.items()
    }

    rows = [*_batches(config), *_ratios(ours, f"{STATED}, {len(ours[SARATHI].inputs):,} requests")]
    for variant, by_name in by_variant.items():
        plus = "" if variant == STATED else "+ "
        if plus or few.workload != config.workload:
            rows += _ratios(by_name, f"{plus}{variant}, {few.workload.num_prompts:,} requests")
    plan, requests = make_plan(config), ours[SARATHI]
    least = bubble_free_seconds(make_costs(config, plan), requests.inputs, requests.outputs, plan.limits.batch)
    for name in (ORCA, SARATHI, EQUAL):
        quantity, setting = f"makespan / bound: {name}", f"{STATED}; bound {number(least)} s"
        rows.append(Row(NAME, quantity, setting, None, ours[name].seconds / least))
    return Artifact(
        "Figure 12: bubbles and completions over 64 GPUs",
        tuple(rows),
        (_bubbles_chart(ours), _completions_chart(ours)),
        (*_notes(ours, least), *_orca_notes(ours, others, by_variant[STATED]), *_variants_notes(by_variant)),
    )


def systems(config: SimulateConfig) -> dict[str, SimulateConfig]:
    """Return the configs of the paper's three systems and of ours, by name.

    With a single stage sends do not matter, so these parameters have their defaults.
    """
    batch, chunk = config.scheduler.batch, config.scheduler.chunk  # type: ignore[attr-defined]
    tensor = replace(
        config,
        parallel=replace(config.parallel, pp=1, depth=None, layers=None),
        scheduler=OrcaBestConfig(batch=TENSOR_BATCH),
        simulation=replace(config.simulation, replicas=TENSOR_REPLICAS, scatter_gather=True, overlap_sends=True),
    )
    return {
        ORCA: replace(config, scheduler=OrcaBestConfig(batch=batch)),
        SARATHI: config,
        TENSOR: tensor,
        EQUAL: replace(config, scheduler=EqualTimeConfig(batch=batch, chunk=chunk, iterations=None)),
    }


def _batches(config: SimulateConfig) -> list[Row]:
    """Compare the paper's B with the memory model's, which has 72 GB per GPU for weights, keys and values."""
    plan = make_plan(config)
    arch, element = plan.arch, BYTES[plan.dtype]
    rows = []
    for name, each in systems(config).items():
        if name in (SARATHI, TENSOR):
            paper = 27 if name == SARATHI else TENSOR_BATCH
            slots = MemoryModel(arch, each.parallel, [config.hardware] * each.parallel.pp, element).slots()
            setting = f"{config.hardware.memory_gib:g} GiB a GPU, requests of {arch.max_position} tokens"
            rows.append(Row(NAME, f"B that fits: {name}", setting, paper, slots // each.parallel.pp))
    return rows


def _ratios(ours: Mapping[str, RunOutcome], setting: str) -> list[Row]:
    rows = []
    for quantity, paper, slow, fast in RATIOS:
        above, below = ours[slow].value(quantity), ours[fast].value(quantity)
        if below:  # a short run may have no bubbles at all
            rows.append(Row(NAME, quantity, setting, paper, above / below))
    return rows


def _all(variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for keys in variants.values() for key, value in keys.items()}


def _bubbles_chart(ours: Mapping[str, RunOutcome]) -> Chart:
    seconds = {name: ours[name].bubbles for name in (ORCA, SARATHI, EQUAL)}
    return cdf(
        Quantity("figure12a", "Figure 12a: bubble time per request", "idle time before its micro-batches", "requests"),
        seconds,
        colours=[series_colour(list(ours).index(name)) for name in seconds],
    )


def _completions_chart(ours: Mapping[str, RunOutcome]) -> Chart:
    unit, factor = time_unit(max(outcome.seconds for outcome in ours.values()))
    series = []
    for number_, (name, outcome) in enumerate(ours.items()):
        x = np.concatenate([[0.0], outcome.finished])
        series.append(Series(name, *thin(x * factor, np.arange(len(x), dtype=np.float64)), series_colour(number_)))
    x_axis, y_axis = Axis("time", unit), Axis("requests", whole=True)
    return Chart("figure12b", "Figure 12b: requests completed", "steps", x_axis, y_axis, tuple(series))


def _notes(ours: Mapping[str, RunOutcome], least: float) -> tuple[str, ...]:
    """Report the outcomes with the stated parameters side by side; `least` is the makespan's bound, in seconds."""
    outer = [cause for cause in CAUSES if cause not in BUBBLES]
    each = list(ours.values())
    over = ["-" if name == TENSOR else f"{outcome.seconds / least:.3f}" for name, outcome in ours.items()]
    lines = [
        ["makespan (s)", *(number(o.seconds) for o in each)],
        ["makespan / bound", *over],
        ["bubble time of a request, median (s)", *(number(o.value("median")) for o in each)],
        ["stage time in PB1 to PB3 and imbalance", *(f"{o.idle_share(UNEVEN_WORK):.2%}" for o in each)],
        ["in transport and control", *(f"{o.idle_share((Cause.TRANSPORT, Cause.CONTROL)):.2%}" for o in each)],
        ["starved, filling and draining", *(f"{o.idle_share(outer):.2%}" for o in each)],
        ["micro-batches with a chunk", *(f"{o.with_chunk.count:,}" for o in each)],
        ["their tokens, mean", *(f"{o.with_chunk.tokens:.0f}" for o in each)],
        ["their time on a stage, mean (ms)", *(number(1e3 * o.with_chunk.seconds) for o in each)],
        ["micro-batches of decodes only", *(f"{o.decodes_only.count:,}" for o in each)],
        ["their time on a stage, mean (ms)", *(number(1e3 * o.decodes_only.seconds) for o in each)],
    ]
    return (
        f"{len(ours[SARATHI].inputs):,} requests, all there at the start. Of TP-only the paper gives the batch and not "
        "the policy; here it runs Orca's best case too. `equal_time` is this project's policy, not the paper's.",
        markdown_table(["", *ours], lines),
        f"The bound, {number(least)} s, is what the slowest of the pipeline's stages would compute if it never waited, "
        "with the tokens dealt into micro-batches of the best sizes and as many decodes in each as B lets in.",
    )


def _orca_notes(
    ours: Mapping[str, RunOutcome], others: Mapping[str, RunOutcome], stated: Mapping[str, RunOutcome]
) -> tuple[str, ...]:
    """Explain Orca's makespan, and compare other baselines over fewer requests.

    Args:
        ours: Outcomes with the stated parameters, by system.
        others: Outcomes of other baselines over fewer requests.
        stated: Outcomes with the stated parameters over fewer requests, by system.
    """
    orca, fast, base = ours[ORCA], ours[SARATHI], stated[SARATHI]
    whole_ms, decodes_ms = 1e3 * orca.with_chunk.seconds, 1e3 * orca.decodes_only.seconds
    lines = [
        [
            name,
            f"{each.seconds / base.seconds:.2f}",
            number(each.value("median") / (base.value("median") or np.nan)),
            f"{each.idle_share(UNEVEN_WORK):.1%}",
        ]
        for name, each in {"Orca's best case": stated[ORCA], **others}.items()
    ]
    return (
        f"Orca's compute alone, on its busiest stage, would take {number(orca.busiest)} s, "
        f"{orca.busiest / fast.seconds:.2f} times SARATHI's makespan; with bubbles it is "
        f"{orca.seconds / fast.seconds:.2f} times. The paper's 1.91 would be bubbles on "
        f"{1 - orca.busiest / (1.91 * fast.seconds):.0%} of Orca's stage time; here they are on "
        f"{orca.idle_share(UNEVEN_WORK):.0%}. A stage takes {number(whole_ms)} ms for a micro-batch with a "
        f"whole prompt and {number(decodes_ms)} ms for one of decodes: each prompt holds up the seven others in "
        "flight, unless they carry prompts too. So what Orca loses hangs on how prompts fall together, which the "
        "paper does not tell of its simulator, and the three ratios with Orca in them hang on it; that of TP-only to "
        "SARATHI does not. "
        f"Over the same {len(base.inputs):,} requests, others stand thus to SARATHI:",
        markdown_table(["", "makespan / SARATHI", "median bubble time / SARATHI", "PB1 to PB3, imbalance"], lines),
    )


def _variants_notes(by_variant: Mapping[str, Mapping[str, RunOutcome]]) -> tuple[str, ...]:
    """Report how each variant changes the makespan of each system."""
    names = (ORCA, SARATHI, TENSOR)
    first, last, lines = by_variant[STATED], list(by_variant.values())[-1], []
    ratios = [ours[ORCA].value("median") / (ours[SARATHI].value("median") or np.nan) for ours in (first, last)]
    for variant, ours in by_variant.items():
        texts = [number(ours[name].seconds) for name in names]
        if variant != STATED:
            changes = [ours[name].seconds / first[name].seconds - 1 for name in names]
            texts = [f"{text} ({change:+.1%})" for text, change in zip(texts, changes, strict=True)]
        lines.append([variant, *texts])
    return (
        "What the stated parameters leave open moves the makespan thus. The host's turnaround is that of a vLLM-like "
        f"engine as microsoft/vidur measured it (Llama-2-70B, four A100s, 24 requests): {BEFORE:.2f} ms before a step, "
        f"{AFTER:.2f} ms after it, {RAY:.1f} ms more where each step goes through Ray. It comes to each micro-batch's "
        "way through the pipeline, and with eight in flight the next waits for a slot.",
        markdown_table(["makespan (s)", *names], lines),
        "The ratio of bubble times is one over a small number, and whatever interrupts the pipeline brings it down: "
        f"SARATHI's median is {number(first[SARATHI].value('median'))} s as stated and "
        f"{number(last[SARATHI].value('median'))} s with all of these, the ratio {number(ratios[0])} and "
        f"{number(ratios[1])}.",
    )
