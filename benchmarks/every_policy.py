"""Simulates every policy on three clusters, four workloads and six loads, and reports where each wins.

    python -m benchmarks.every_policy --trace TRACE.csv.gz

Three clusters of A100s: LLaMA 13B over two stages, LLaMA 2 70B over two stages of four ranks, GPT-3 over eight stages
of eight. Four workloads: `fixed` prompts of 1,024 and outputs of 256 tokens; `zipf` with the defaults of its config
group; a section of a `trace` at an offset drawn from the seed (only with --trace); `long`, which is `fixed` with 4% of
the prompts 16,000 to 32,000 tokens long. Five loads with Poisson arrivals, as shares of the throughput of
`token_budget` when all requests arrive at once; and `at once` itself. Numbers are means over the seeds.

One row per cell: the policy with the most requests/s; those with the shortest p99 TTFT and p99 TBT among policies that
reach 99% of it; and `equal_time`'s ratios to the best of its rivals, and its inner idle time less their minimum, in
points. A rival is another policy that reaches 99% of `equal_time`'s requests/s, with a p99 TTFT of at most ten times
the shortest: at 25% load, a policy that makes requests wait for seconds has the same throughput and a short TBT. The
same limit applies to the shortest p99 TBT.

Flags mark where `equal_time` is behind: T by over 1% in requests/s, F and B by over 5% in p99 TTFT and p99 TBT, I by
over 0.5 points of idle time; D: a rival is level or ahead in both tails, and over 5% ahead in one. The last tables are
geometric means over the cells of a load.

Fails if a policy leaves a request unfinished or a ledger does not add up. Overrides of `gapless simulate` follow the
options. Three to four minutes per seed on two cores, compiled.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np

from gapless.conf.policies import POLICY_CONFIGS, EqualTimeConfig, SchedulerConfig
from gapless.conf.schema import SimulateConfig
from gapless.launch.turns import requests
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.simulation.workload import Workload
from gapless.runtime.simulation.workload.arrivals import arrivals

from .support.harness import Benchmark, Row, figures, say
from .support.simulated import configure, fleet_of
from .support.winners import draw_winners

CLUSTERS = {
    "llama-13b pp2": "model=llama-13b parallel=pp2",
    "llama2-70b tp4_pp2": "model=llama2-70b parallel=tp4_pp2",
    "gpt3-175b tp8_pp8": "model=gpt3-175b parallel=tp8_pp8",
}
FIXED = "workload=fixed workload.input_len=1024 workload.output_len=256"
WORKLOADS = {"fixed": FIXED, "zipf": "workload=zipf", "trace": "workload=trace", "long": FIXED}
LONG, LONG_SHARE = (16_000, 32_000), 0.04  # tokens of a long prompt; of the requests
CONTEXT = 33_000
LOADS = ("25%", "50%", "75%", "95%", "120%")
AT_ONCE = "at once"
OWN = "equal_time"
ITERATIONS: tuple[int | None, ...] = (8, None)  # more settings of `equal_time`, besides its default
SAME, BEHIND, IDLE_POINTS, USABLE = 0.99, 1.05, 0.5, 10.0  # see above
TRADED = {"requests_per_s": "requests_per_s_ratio", "p99_ttft_s": "p99_ttft_ratio", "p99_tbt_ms": "p99_tbt_ratio"}
CELL = ("cluster", "workload", "load")
METRICS = ("requests_per_s", "p50_ttft_s", "p99_ttft_s", "p99_tbt_ms", "inner_idle_share")


@dataclass(frozen=True, slots=True)
class Grid:
    """Parameters common to all cells."""

    trace: Path | None
    num_requests: int
    overrides: tuple[str, ...]

    @property
    def workloads(self) -> list[str]:
        return [name for name in WORKLOADS if name != "trace" or self.trace is not None]


@dataclass(frozen=True, slots=True)
class Cell:
    cluster: str
    workload: str
    load: str
    seed: int


def main() -> int:
    bench = Benchmark(
        __doc__,
        overrides=True,
        trace={"type": Path, "metavar": "FILE", "help": "also simulate a section of this trace"},
        seed={"type": int, "action": "append", "help": "seed of lengths and arrivals; repeatable"},
        requests=400,
        jobs=2,
        picture={"type": Path, "metavar": "FILE", "help": "draw a map of the winners as PNG"},
    )
    given = bench.given
    if any(override.startswith("scheduler=") for override in given.overrides):
        bench.parser.error("every policy runs: leave scheduler= out")
    if given.trace and not given.trace.is_file():
        bench.parser.error(f"--trace {given.trace}: no such file")
    seeds = given.seed or [0]
    rows = simulate_grid(Grid(given.trace, given.requests, tuple(given.overrides)), seeds, given.jobs)
    mean = means(rows)
    by_seed = {f"seed {seed}": [row for row in rows if row["seed"] == seed] for seed in seeds}
    if len(seeds) > 1:
        by_seed["mean"] = mean
    bench.tables |= {
        "policies": mean,
        "cells": compare(mean, OWN),
        "summary": [
            {"seed": seed, **counts(compare(some, own))} for seed, some in by_seed.items() for own in own_labels()
        ],
        "trades": trades(mean),
    }
    if given.picture:
        draw_winners(given.picture, bench.tables["cells"], tuple(POLICY_CONFIGS))
    shown = [key for key in bench.tables["cells"][0] if key != "own"]
    return bench.end(hidden=["policies"], columns={"cells": shown})


def simulate_grid(grid: Grid, seeds: Sequence[int], jobs: int) -> list[Row]:
    """Simulate all cells, `at once` first, since it defines 100% load. Return a row per cell and policy."""
    drawn = list(product(CLUSTERS, grid.workloads, seeds))
    rows: list[Row] = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:

        def simulate_cells(cells: list[Cell], rates: Sequence[float | None]) -> None:
            for cell, found in zip(cells, pool.map(partial(simulate_cell, grid), cells, rates), strict=True):
                say(f"{cell.cluster}, {cell.workload}, {cell.load}, seed {cell.seed}")
                rows.extend(found)

        at_once = [Cell(cluster, workload, AT_ONCE, seed) for cluster, workload, seed in drawn]
        simulate_cells(at_once, [None] * len(at_once))
        saturation = {
            (row["cluster"], row["workload"], row["seed"]): row["requests_per_s"]
            for row in rows
            if row["policy"] == "token_budget"
        }
        cells = [Cell(cluster, workload, load, seed) for cluster, workload, seed in drawn for load in LOADS]
        rates = [float(one.load.rstrip("%")) / 100 * saturation[one.cluster, one.workload, one.seed] for one in cells]
        simulate_cells(cells, rates)
    order = {key: number for number, key in enumerate(product(CLUSTERS, WORKLOADS, (*LOADS, AT_ONCE)))}
    return sorted(rows, key=lambda row: (order[row["cluster"], row["workload"], row["load"]], row["seed"]))


def simulate_cell(grid: Grid, cell: Cell, rate: float | None) -> list[Row]:
    """Simulate a cell under every policy, at `rate` requests/s; None: all at once."""
    config = composed(grid, cell.cluster, cell.workload)
    workload = drawn(grid, cell.cluster, cell.workload, cell.seed)
    timed = replace(config.workload, request_rate=rate or float("inf"), seed=cell.seed)
    workload = replace(workload, arrivals=arrivals(timed, len(workload)))
    return [
        asdict(cell)
        | {"policy": label, **simulate(replace(config, scheduler=policy, policies=(), seed=cell.seed), workload)}
        for label, policy in labelled(config.policies).items()
    ]


@lru_cache
def composed(grid: Grid, cluster: str, workload: str) -> SimulateConfig:
    which = f"workload.path={grid.trace}" if workload == "trace" else f"workload.num_prompts={grid.num_requests}"
    context = f"model.architecture.max_position={CONTEXT} scheduler={','.join(POLICY_CONFIGS)}"
    return configure("hardware=a100-80g", CLUSTERS[cluster], context, WORKLOADS[workload], *grid.overrides, which)


def drawn(grid: Grid, cluster: str, workload: str, seed: int) -> Workload:
    """Draw the lengths of a workload's requests; they are the same at every load."""
    config = composed(grid, cluster, workload)
    made = requests(replace(config, workload=replace(config.workload, seed=seed)))[0]
    generator = np.random.default_rng((seed, list(WORKLOADS).index(workload)))
    if workload == "trace":
        first = int(generator.integers(max(1, len(made) - grid.num_requests)))
        part = slice(first, first + grid.num_requests)
        prefixes = None if made.prefixes is None else made.prefixes[part]
        return replace(made, input_lens=made.input_lens[part], output_lens=made.output_lens[part], prefixes=prefixes)
    if workload == "long":
        count = max(1, round(LONG_SHARE * len(made)))
        lengths = made.input_lens.copy()
        lengths[generator.permutation(len(made))[:count]] = generator.integers(*LONG, count)
        return replace(made, input_lens=lengths)
    return made


def labelled(policies: Iterable[SchedulerConfig]) -> dict[str, SchedulerConfig]:
    """Return all policies by name, followed by `equal_time` with other iterations."""
    named = {policy.name: policy for policy in policies}
    own = named[OWN]
    assert isinstance(own, EqualTimeConfig)
    others = [replace(own, iterations=iterations) for iterations in ITERATIONS]
    return named | dict(zip(own_labels()[1:], others, strict=True))


def own_labels() -> list[str]:
    return [OWN, *(f"{OWN} iterations={'null' if number is None else number}" for number in ITERATIONS)]


def simulate(config: SimulateConfig, workload: Workload) -> Row:
    """Simulate one policy, check the run, and return its metrics."""
    fleet = fleet_of(config, workload)
    ended = sum(request.finished is not None for record in fleet.records for request in record.requests)
    assert ended == len(workload), f"{config.scheduler.name}: {ended} of {len(workload)} requests ended"
    fleet.check()
    summary = summarize(fleet)
    assert (summary["total_output_tokens"], summary["failed"]) == (int(workload.output_lens.sum()), 0)
    names = [name.replace("p50", "median") for name in METRICS]
    return dict(zip(METRICS, map(_rounded, figures(summary, *names).values()), strict=True))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def by(rows: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Group rows by these columns."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def means(rows: Iterable[Row]) -> list[Row]:
    """Average over the seeds, per cell and policy."""
    keys = (*CELL, "policy")
    return [
        dict(zip(keys, names, strict=True))
        | {metric: _rounded(float(np.mean([row[metric] for row in same]))) for metric in METRICS}
        for names, same in by(rows, *keys).items()
    ]


def compare(rows: Iterable[Row], own: str) -> list[Row]:
    """Return for each cell the winners, and how `own`, a label of `equal_time`, compares with the others."""
    cells = by((row for row in rows if row["policy"] == own or row["policy"] not in own_labels()), *CELL)
    found = []
    for names, of_cell in cells.items():
        (mine,) = (row for row in of_cell if row["policy"] == own)
        cell = dict(zip(CELL, names, strict=True)) | {"own": own, **winners(of_cell)}
        cell |= beside(mine, [row for row in of_cell if row is not mine])
        found.append(cell | {"flags": flags(cell)})
    return found


def winners(rows: Sequence[Row]) -> Row:
    """Return the policy with the highest requests/s, and those with the shortest tails at that throughput."""
    most = max(rows, key=lambda row: row["requests_per_s"])
    alike = usable(row for row in rows if row["requests_per_s"] >= SAME * most["requests_per_s"])
    ttft, tbt = (min(alike, key=lambda row: row[key]) for key in ("p99_ttft_s", "p99_tbt_ms"))
    return {
        "most_by": most["policy"],
        "most_requests_per_s": most["requests_per_s"],
        "ttft_by": ttft["policy"],
        "shortest_p99_ttft_s": ttft["p99_ttft_s"],
        "tbt_by": tbt["policy"],
        "shortest_p99_tbt_ms": tbt["p99_tbt_ms"],
    }


def usable(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose p99 TTFT is at most ten times the shortest."""
    found = list(rows)
    most = USABLE * min((row["p99_ttft_s"] for row in found), default=0.0)
    return [row for row in found if row["p99_ttft_s"] <= most]


def beside(own: Row, others: Sequence[Row]) -> Row:
    """Compare `equal_time` with its rivals. A ratio is None without rivals."""
    carriers = [row for row in others if row["requests_per_s"] >= SAME * own["requests_per_s"]]
    rivals = [row for row in usable([own, *carriers]) if row is not own]

    def ratio(key: str) -> float | None:
        return own[key] / min(row[key] for row in rivals) if rivals else None

    least_idle = min((row["inner_idle_share"] for row in rivals), default=None)
    return {
        "requests_per_s_ratio": own["requests_per_s"] / max(row["requests_per_s"] for row in others),
        "p99_ttft_ratio": ratio("p99_ttft_s"),
        "p99_tbt_ratio": ratio("p99_tbt_ms"),
        "idle_points": None if least_idle is None else 100 * (own["inner_idle_share"] - least_idle),
        "dominated_by": " ".join(row["policy"] for row in rivals if dominates(row, own)),
    }


def dominates(row: Row, own: Row) -> bool:
    """Return whether a rival is level or ahead in both tails, and ahead by over 5% in one."""
    ratios = [own[key] / row[key] for key in ("p99_ttft_s", "p99_tbt_ms")]
    return min(ratios) >= 1 and max(ratios) > BEHIND


def flags(cell: Mapping[str, Any]) -> str:
    """Return the flags of the metrics in which `equal_time` is behind."""
    found = "T" * (cell["requests_per_s_ratio"] < SAME)
    for letter, key, most in (
        ("F", "p99_ttft_ratio", BEHIND),
        ("B", "p99_tbt_ratio", BEHIND),
        ("I", "idle_points", IDLE_POINTS),
    ):
        found += letter * (cell[key] is not None and cell[key] > most)
    return found + "D" * bool(cell["dominated_by"])


def counts(cells: Sequence[Row]) -> Row:
    """Count the cells in which `equal_time` is level or ahead."""
    found: Row = {"policy": cells[0]["own"], "cells": len(cells)}
    for key, behind in (("requests/s", "T"), ("TTFT", "F"), ("TBT", "B"), ("both tails", "FB"), ("idle", "I")):
        found[key] = sum(not set(behind) & set(cell["flags"]) for cell in cells)
    found["not dominated"] = sum(not cell["dominated_by"] for cell in cells)
    return found


def trades(rows: Sequence[Row]) -> list[Row]:
    """Return the other policies' ratios to `equal_time` at each load: geometric means over the cells."""
    own = {tuple(row[key] for key in CELL): row for row in rows if row["policy"] == OWN}
    ratios = {
        names: [[row[key] / own[tuple(row[key] for key in CELL)][key] for row in same] for key in TRADED]
        for names, same in by((row for row in rows if row["policy"] != OWN), "policy", "load").items()
    }
    return [
        {"policy": policy, "load": load} | dict(zip(TRADED.values(), map(geometric_mean, found), strict=True))
        for (policy, load), found in ratios.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
