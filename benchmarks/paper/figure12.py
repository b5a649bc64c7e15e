"""Figure 12: bubbles and completions of GPT-3 on 64 A100s: Orca's best case, SARATHI and tensor parallelism alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gapless.conf.policies import EqualTimeConfig, OrcaBestConfig
from gapless.conf.schema import SimulateConfig
from gapless.models.memory import BYTES, MemoryModel
from gapless.runtime.analysis.drawing.chart import Axis, Chart, Series, series_colour
from gapless.runtime.analysis.drawing.distributions import Quantity, cdf
from gapless.runtime.analysis.drawing.formatting import time_unit
from gapless.runtime.analysis.drawing.thinning import thin
from gapless.runtime.analysis.ledger.causes import BUBBLES, CAUSES, UNEVEN_WORK, Cause
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.simulation.pipeline.make_costs import make_costs

from .artifact import Artifact, Row, Simulate, markdown_table, number
from .bound import bubble_free_seconds
from .outcome import RunOutcome

NAME = "Figure 12"
ORCA, SARATHI, TENSOR, EQUAL = "TP-PP Orca", "TP-PP SARATHI", "TP-only", "TP-PP equal_time"
TENSOR_BATCH = 11  # B of a replica with eight tensor-parallel ranks (5.3)
TENSOR_REPLICAS = 8
# Each ratio: the quantity, the paper's number, the system above and the system below.
RATIOS = (
    ("median bubble time: Orca / SARATHI", 6.29, ORCA, SARATHI),
    ("makespan: Orca / SARATHI", 1.91, ORCA, SARATHI),
    ("makespan: TP-only / SARATHI", 1.48, TENSOR, SARATHI),
    ("makespan: Orca / TP-only", 1.28, ORCA, TENSOR),
)


def figure12(config: SimulateConfig, simulate: Simulate) -> Artifact:
    """Simulate the paper's systems and the policy `equal_time`, beside the lower bound of the makespan."""
    ours = {name: RunOutcome(simulate(each, name)) for name, each in systems(config).items()}
    plan, requests = make_plan(config), ours[SARATHI]
    least = bubble_free_seconds(make_costs(config, plan), requests.inputs, requests.outputs, plan.limits.batch)
    rows = [*_batches(config), *_ratios(ours, f"{len(requests.inputs):,} requests")]
    for name in (ORCA, SARATHI, EQUAL):
        quantity = f"makespan / bound: {name}"
        rows.append(Row(NAME, quantity, f"bound {number(least)} s", None, ours[name].seconds / least))
    return Artifact(
        "Figure 12: bubbles and completions over 64 GPUs",
        tuple(rows),
        (_bubbles_chart(ours), _completions_chart(ours)),
        (*_notes(ours, least), _orca_note(ours[ORCA], ours[SARATHI])),
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
    """Compare the outcomes with the stated parameters; `least` is the lower bound of the makespan, in seconds."""
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


def _orca_note(orca: RunOutcome, fast: RunOutcome) -> str:
    """Explain Orca's makespan compared with SARATHI's, `fast`."""
    whole_ms, decodes_ms = 1e3 * orca.with_chunk.seconds, 1e3 * orca.decodes_only.seconds
    return (
        f"Orca's compute alone, on its busiest stage, would take {number(orca.busiest)} s, "
        f"{orca.busiest / fast.seconds:.2f} times SARATHI's makespan; with bubbles it is "
        f"{orca.seconds / fast.seconds:.2f} times. The paper's 1.91 would be bubbles on "
        f"{1 - orca.busiest / (1.91 * fast.seconds):.0%} of Orca's stage time; here they are on "
        f"{orca.idle_share(UNEVEN_WORK):.0%}. A stage takes {number(whole_ms)} ms for a micro-batch with a "
        f"whole prompt and {number(decodes_ms)} ms for one of decodes: each prompt holds up the seven others in "
        "flight, unless they carry prompts too. So what Orca loses hangs on how prompts fall together, which the "
        "paper does not tell of its simulator, and the three ratios with Orca in them hang on it; that of TP-only to "
        "SARATHI does not."
    )
