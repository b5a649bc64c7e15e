"""Simulated runs with one planted problem each, their controls, and healthy runs, as overrides of `gapless simulate`.

A plant costs about 8 to 15% (small), 20 to 40% (medium) or more than 50% (large) of the run. Its cost is the planted
run minus its control, the same run without the problem.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from gapless.runtime.analysis.explain.roots import Root

from .harness import words

SIZES = ("small", "medium", "large")
ROOTS = {  # by kind: causes that count as right
    "link": {Root.TRANSPORT},
    "split": {Root.UNEVEN_LAYERS},
    "slow card": {Root.SLOW_STAGE},
    "small chunk": {Root.SMALL_CHUNK},
    "large chunk": {Root.LARGE_CHUNK},
    "few clients": {Root.FEW_REQUESTS},
    "overload": {Root.OVERLOAD},
    "small KV": {Root.KV_FULL},
    "preemption": {Root.PREEMPTION},
    "hog": {Root.STRAGGLER, Root.CHANCE, Root.CONTENTION},
    "long prompt": {Root.LONG_PROMPTS},
    "policy": {Root.POLICY},
}
REAL_ROOTS = ROOTS | {"small KV": {Root.KV_FULL, Root.PREEMPTION}, "slow disk": {Root.STRAGGLER}}
A100, LLAMA_13B = "hardware=a100-80g", "model=llama-13b hardware=a100-80g cluster=pcie parallel=pp2"
LLAMA_33B = "model=llama-33b hardware=a100-80g cluster=pcie parallel=pp4 workload=zipf workload.num_prompts=60"
LLAMA_70B = "model=llama2-70b hardware=h100 parallel=tp8_pp4 workload=zipf workload.num_prompts=80"
SHORT = "workload=zipf workload.min_len=100 workload.max_len=1500 workload.num_prompts=200"
EQUAL, SARATHI = "scheduler=equal_time", "scheduler=sarathi"
FLUENT = "workload=fixed workload.input_len=200 workload.output_len=400 workload.range_ratio=0.5"
PROMPTS = "workload=fixed workload.input_len=1500 workload.output_len=8 workload.range_ratio=0.3"


@dataclass(frozen=True, slots=True)
class Plant:
    """A run with one problem.

    Attributes:
        kind: of `ROOTS`.
        size: of `SIZES`.
        base: overrides common to the run and its control.
        problem: overrides that cause the problem.
        control: overrides in place of `problem`.
        undo: override that undoes the problem; empty if no key does.
        metric: of `METRICS`; the true cost is measured in it.
    """

    kind: str
    size: str
    base: str
    problem: str
    control: str = ""
    undo: str = ""
    metric: str = "duration"

    @property
    def name(self) -> str:
        """Kind and size."""
        return f"{self.kind}, {self.size}"

    @property
    def planted(self) -> list[str]:
        """Overrides of the run with the problem."""
        return words(f"{self.base} {self.problem}".strip())

    @property
    def without(self) -> list[str]:
        """Overrides of the control."""
        return words(f"{self.base} {self.control}".strip())


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="gl")


def trace(name: str, prompts: Sequence[int], output: int) -> str:
    """Write a trace of requests that arrive together, and return the overrides that read it."""
    path = Path(_folder().name) / f"{name}.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        rows.writerows([0.0, prompt, output] for prompt in prompts)
    return f"workload=trace workload.path={path} workload.request_rate=inf"


def among(prompt: int, count: int, long: int, every: int, output: int) -> tuple[str, str]:
    """Return the overrides for usual prompts with an occasional long one, and for usual prompts only."""
    several = [long if number % every == every // 2 else prompt for number in range(count)]
    name = f"{prompt}_{count}_{long}_{every}_{output}"
    return trace(name, several, output), trace(f"{name}_usual", [prompt] * count, output)


def _link(name: str, rate: float, least_us: float, ramp_us: float, knee: float) -> str:
    return f"cluster.{name}={{least_us:{least_us},ramp_us:{ramp_us},gigabytes_per_s:{rate},knee:{knee}}}"


def _node(rate: float) -> str:
    return _link("node", rate, 38.34, 6.18, 1.909)


def _network(rate: float) -> str:
    return _link("network", rate, 19.64, 0.0, 1.0)


@cache
def plants() -> list[Plant]:
    """Return the plants of all kinds and sizes."""
    found = [
        # A link far slower than the hardware's.
        Plant("link", "small", f"{LLAMA_33B} {EQUAL}", _node(0.16)),
        Plant("link", "medium", f"{LLAMA_70B} {EQUAL}", _network(0.07)),
        Plant("link", "large", f"{LLAMA_13B} {SHORT} {EQUAL}", _node(0.045)),
        # An uneven layer split.
        *(
            Plant("split", size, base, f"parallel.layers={layers}", undo="parallel.layers=null")
            for size, base, layers in (
                ("small", f"{LLAMA_13B} {SHORT} {EQUAL}", "[23,17]"),
                ("medium", f"{LLAMA_33B} {SARATHI}", "[20,14,13,13]"),
                ("large", f"{LLAMA_33B} scheduler=token_budget", "[9,9,9,33]"),
            )
        ),
        # One stage on a slower GPU with as many layers as the others.
        Plant(
            "slow card",
            "small",
            f"model=mistral-7b hardware=h200 parallel=pp4 parallel.layers=[8,8,8,8] cache.num_blocks=20000 {EQUAL} "
            "workload=zipf workload.num_prompts=100 workload.pd_ratio=3",
            "simulation.devices=[h200,h200,h100,h200]",
        ),
        Plant(
            "slow card",
            "medium",
            f"model=llama2-70b hardware=h200 parallel=tp4_pp2 parallel.layers=[40,40] cache.num_blocks=10000 {EQUAL} "
            "workload=fixed workload.input_len=600 workload.output_len=200 workload.num_prompts=120",
            "simulation.devices=[h200,h100]",
        ),
        Plant(
            "slow card",
            "large",
            f"{LLAMA_13B} {SHORT} {EQUAL} parallel.layers=[20,20] cache.num_blocks=2700",
            "simulation.devices=[a6000,a100-80g]",
        ),
        # Chunks too small to saturate the devices.
        *(
            Plant("small chunk", size, base, f"{key}={less}", f"{key}={usual}", f"{key}={usual}")
            for size, base, key, less, usual in (
                ("small", f"{LLAMA_33B} scheduler=token_budget", "scheduler.max_batched_tokens", 112, 256),
                ("medium", f"{LLAMA_33B} {SARATHI}", "scheduler.chunk", 64, 256),
                (
                    "large",
                    "model=llama2-70b hardware=a100-80g cluster=ethernet-100g parallel=tp8_pp2 scheduler=token_budget "
                    "workload=fixed workload.input_len=1800 workload.output_len=20 workload.num_prompts=60",
                    "scheduler.max_batched_tokens",
                    128,
                    4096,
                ),
            )
        ),
        # Chunks so large that the pipeline lacks micro-batches.
        *(
            Plant("large chunk", size, base, f"{key}={more}", f"{key}={usual}", f"{key}={usual}")
            for size, base, key, more, usual in (
                (
                    "small",
                    "model=llama3-8b hardware=a100-80g parallel=pp4 scheduler=token_budget workload=fixed "
                    "workload.input_len=2000 workload.output_len=30 workload.num_prompts=48",
                    "scheduler.max_batched_tokens",
                    8192,
                    1024,
                ),
                (
                    "medium",
                    "model=llama3-8b hardware=a100-80g parallel=pp4 model.architecture.max_position=65536 "
                    f"{SARATHI} workload=fixed workload.input_len=24000 workload.output_len=40 workload.num_prompts=16",
                    "scheduler.chunk",
                    24_000,
                    2048,
                ),
                (
                    "large",
                    "model=llama3-8b hardware=a100-80g parallel=pp8 scheduler=token_budget workload=fixed "
                    "workload.input_len=1500 workload.output_len=16 workload.num_prompts=60",
                    "scheduler.max_batched_tokens",
                    32_768,
                    1024,
                ),
            )
        ),
        # A closed loop of too few clients.
        *(
            Plant("few clients", size, base, f"{key}={few}", undo=f"{key}=null")
            for key in ("workload.max_concurrency",)
            for size, base, few in (
                ("small", f"{LLAMA_13B} {SHORT} {EQUAL}", 44),
                ("medium", f"{LLAMA_33B} {EQUAL}", 24),
                ("large", f"{LLAMA_13B} {SHORT} {EQUAL}", 8),
            )
        ),
        # A request rate above capacity.
        *(
            Plant("overload", size, f"{base} workload.request_rate={rate}", "", "simulation.replicas=8")
            for size, base, rate in (
                (
                    "small",
                    f"{LLAMA_13B} {EQUAL} workload=fixed workload.input_len=100 workload.output_len=60 "
                    "workload.range_ratio=0.5 workload.num_prompts=400",
                    85,
                ),
                ("medium", f"{LLAMA_33B} {SARATHI} workload.num_prompts=200 workload.max_len=2000", 8),
                ("large", f"{LLAMA_13B} {SHORT} {EQUAL}", 60),
            )
        ),
        # A KV cache so small that requests wait for admission.
        *(
            Plant("small KV", size, base, f"cache.num_blocks={blocks}", undo="cache.num_blocks=null")
            for size, base, blocks in (
                ("small", f"{LLAMA_13B} {SHORT} {EQUAL}", 2700),
                ("medium", f"{LLAMA_13B} {SHORT} {EQUAL}", 1400),
                (
                    "large",
                    f"model=llama-7b hardware=a100-80g parallel=pp4 scheduler=token_budget {PROMPTS} "
                    "scheduler.max_batched_tokens=2048 workload.num_prompts=150",
                    240,
                ),
            )
        ),
        # A KV cache so small that requests are preempted.
        *(
            Plant("preemption", size, base, f"cache.num_blocks={blocks}", undo="cache.num_blocks=null")
            for size, base, blocks in (
                (
                    "small",
                    f"{LLAMA_13B} {EQUAL} workload=fixed workload.input_len=50 workload.output_len=300 "
                    "workload.range_ratio=0.1 workload.num_prompts=120",
                    2050,
                ),
                ("medium", f"{LLAMA_13B} {SARATHI} {FLUENT} workload.num_prompts=100", 1900),
                (
                    "large",
                    f"model=llama3-8b hardware=h200 parallel=pp4 {EQUAL} {FLUENT} workload.num_prompts=128",
                    1000,
                ),
            )
        ),
        # Other work on the devices: some stage times are longer.
        Plant(
            "hog",
            "small",
            f"{LLAMA_33B} {EQUAL}",
            "simulation.straggler_rate=0.04 simulation.straggler_factor=2",
        ),
        Plant("hog", "medium", f"{LLAMA_13B} {SHORT} {EQUAL}", "simulation.jitter=0.9"),
        Plant(
            "hog",
            "large",
            f"{LLAMA_33B} {SARATHI}",
            "simulation.straggler_rate=0.1 simulation.straggler_factor=6",
        ),
    ]
    llama_8b = "model=llama3-8b hardware=a100-80g cluster=pcie model.architecture.max_position=131072"
    for size, base, lengths in (
        ("small", f"{llama_8b} parallel=pp2 {EQUAL} scheduler.chunk=2048", (600, 200, 7_000, 100, 40)),
        (
            "medium",
            f"{llama_8b} parallel=pp4 scheduler=token_budget scheduler.max_batched_tokens=512",
            (800, 150, 30_000, 75, 60),
        ),
        ("large", f"{llama_8b} parallel=pp4 {EQUAL} scheduler.chunk=1024", (500, 150, 60_000, 50, 50)),
    ):
        problem, control = among(*lengths)
        found.append(Plant("long prompt", size, base, problem, control))
    for size, base, policy, usual in (
        ("small", f"{LLAMA_33B} workload.pd_ratio=3", "request_level", "equal_time"),
        ("medium", f"{LLAMA_33B} workload.pd_ratio=3", "prefill_first", "equal_time"),
        (
            "large",
            "model=mistral-7b hardware=a100-80g parallel=pp4 workload=fixed workload.input_len=900 "
            "workload.output_len=150 workload.range_ratio=0.9 workload.num_prompts=200",
            "orca_worst",
            "equal_time",
        ),
    ):
        problem, control = f"scheduler={policy}", f"scheduler={usual}"
        found.append(Plant("policy", size, base, problem, control, control))
    return found


def healthy() -> dict[str, str]:
    """Return the overrides of runs that no change improves much, by name."""
    llama_8b = "model=llama3-8b hardware=a100-80g parallel=pp1"
    return {
        "offline, pp4": f"{LLAMA_33B} {EQUAL} workload.num_prompts=80",
        "offline, pp2": f"{LLAMA_13B} {SHORT} {EQUAL} scheduler.chunk=512",
        "offline, pp1": f"{llama_8b} {SHORT} {EQUAL} scheduler.chunk=4096",
        "offline, tp8 pp4": f"{LLAMA_70B} {EQUAL} workload.num_prompts=160",
        "offline, tp8 pp2": f"model=llama2-70b hardware=a100-80g parallel=tp8_pp2 {EQUAL} "
        "scheduler.chunk=2048 workload=zipf",
        "offline, token_budget": f"{LLAMA_33B} scheduler=token_budget workload.num_prompts=80",
        "offline, sarathi": f"{LLAMA_33B} {SARATHI} workload.pd_ratio=3 workload.num_prompts=80",
        "light open loop": f"{LLAMA_33B} {SARATHI} workload.request_rate=0.5",
        "light open loop, pp1": f"{llama_8b} {SHORT} {EQUAL} workload.request_rate=4",
        "open loop, half busy": f"{LLAMA_13B} {SHORT} {EQUAL} workload.request_rate=8",
        "single request": f"{llama_8b} {EQUAL} workload.num_prompts=1",
        "single request, pp2": "model=llama3-8b hardware=a100-80g parallel=pp2 cluster=ethernet-25g "
        f"cluster.devices_per_node=1 {EQUAL} workload.num_prompts=1",
        "short run": f"{LLAMA_13B} {SHORT} {EQUAL} workload.num_prompts=8",
        "long outputs": f"model=llama3-8b hardware=h200 parallel=pp4 {EQUAL} {FLUENT} workload.num_prompts=400",
        "prompts only": f"model=llama-7b hardware=a100-80g parallel=pp4 {EQUAL} {PROMPTS} workload.output_len=1",
        "long prompts": f"{llama_8b} model.architecture.max_position=65536 {EQUAL} scheduler.chunk=2048 "
        "workload=fixed workload.input_len=20000 workload.output_len=64 workload.num_prompts=20",
        "MoE": "model=mixtral-8x7b hardware=h100 parallel=tp2_pp2 scheduler=equal_time workload=zipf",
        "small jitter": f"{LLAMA_33B} {EQUAL} simulation.jitter=0.03",
        "many clients": f"{LLAMA_13B} {SHORT} {EQUAL} workload.max_concurrency=160",
        "bursts": f"{LLAMA_13B} {SHORT} {EQUAL} workload.request_rate=10 workload.burstiness=0.3",
    }
