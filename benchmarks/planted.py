"""Evaluates explanations on planted problems: `python -m benchmarks.planted`.

Simulated runs with one problem each (12 kinds, three sizes: `support/plants.py`), their controls (the same runs without
the problem), and healthy runs of all shapes. The true cost of a problem is the planted run minus its control. The table
shows the first cause that the explanation names and the cost that it claims; whether the cause is right and the claim
within 10% of the truth; and whether the suggested change saves about as much as the best single change. Both changes
are simulated.

`--only KIND` evaluates one kind, `--healthy` only the healthy runs. Ten minutes of one core.

`--real` plants problems in a real pipeline of two stages (`support/real_plants.py`), or runs healthy ones with
`--healthy`; six minutes on 2 otherwise idle cores.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import yaml

from gapless.conf.build import to_mapping
from gapless.conf.errors import ConfigError
from gapless.conf.schema import ComparisonConfig, SimulateConfig
from gapless.runtime.analysis.explain.analysed_run import AnalysedRun
from gapless.runtime.analysis.explain.explain_run import quick_explanation
from gapless.runtime.analysis.explain.explanation import METRICS, TOLERANCE, seconds_of
from gapless.runtime.analysis.explain.roots import Root
from gapless.runtime.analysis.explain.sized_cause import SizedCause
from gapless.runtime.analysis.explain.twin import Values, changed_config, values_of
from gapless.runtime.analysis.run_folder.run_info import RunInfo
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.pipeline.protocol import PipelineError

from .support.harness import Benchmark, Row
from .support.plants import REAL_ROOTS, ROOTS, Plant, healthy, plants
from .support.real_plants import real_healthy, real_plants, real_run
from .support.simulated import configure, replicas_of

SECONDS = 8.0  # of an explanation
WITHIN = 0.1  # tolerated error of a claimed cost, as a share of the truth
WITHIN_REAL = 0.2  # the same in a real pipeline
LEAST_SAVING = 0.03  # share of the run below which a change does not count
BEHIND = 0.02  # share of the run by which a suggested change may save less than the best one


@dataclass(frozen=True, slots=True)
class Explained:
    """A run and its explanation.

    Attributes:
        run: the analysed run.
        config: its config.
        values: its values by metric.
        causes: in the explanation, largest first.
        seconds: time that the explanation took.
    """

    run: AnalysedRun
    config: ComparisonConfig
    values: Values
    causes: Sequence[SizedCause]
    seconds: float


def main() -> int:
    bench = Benchmark(__doc__, only={"choices": [*REAL_ROOTS], "metavar": "KIND"}, healthy=False, real=False)
    if bench.given.real and bench.given.healthy:
        for plant in real_healthy():
            bench.row("healthy", **diagnosed(plant.kind, explained_record(*real_run(plant, is_control=True))))
        return bench.end()
    if bench.given.real:
        for plant in real_plants():
            if bench.given.only in (None, plant.kind):
                bench.row("real", **planted_for_real(plant))
        return bench.end()
    only, seconds = bench.given.only, []
    for plant in plants() if not bench.given.healthy else []:
        if only in (None, plant.kind):
            row = judged(plant)
            seconds.append(row["took_s"])
            bench.row("plants", **row)
    for name, keys in healthy().items() if only is None else []:
        row = diagnosed(name, explained([keys]))
        seconds.append(row["took_s"])
        bench.row("healthy", **row)
    rows, well = bench.tables.get("plants", []), bench.tables.get("healthy", [])
    changes = [row["best_change"] for row in rows if row["best_change"] is not None]
    bench.row(
        "totals",
        causes=_of([row["right"] for row in rows]),
        sizes=_of([row["within"] for row in rows]),
        best_change_first=_of(changes),
        called_ill=_of([row["ill"] for row in well]),
        median_took_s=statistics.median(seconds),
        most_took_s=max(seconds),
    )
    return bench.end()


def _of(several: Sequence[bool]) -> str:
    return f"{sum(several)} of {len(several)}"


def explained(keys: Sequence[str]) -> Explained:
    """Simulate a run and explain it."""
    config = configure(*keys)
    [replica] = replicas_of(config)
    return explained_record(replica.record, config)


def explained_record(record: RunRecord, config: ComparisonConfig) -> Explained:
    """Explain a run."""
    begin = perf_counter()
    run = AnalysedRun.of(record, RunInfo(to_mapping(config)), partial(quick_explanation, seconds=SECONDS))
    causes = run.causes
    return Explained(run, config, values_of(record), causes, perf_counter() - begin)


def values_with(config: SimulateConfig) -> Values:
    """Simulate a config; return each value's maximum over the replicas."""
    several = [values_of(replica.record) for replica in replicas_of(config)]
    return {metric: max(values[metric] for values in several) for metric in METRICS}


def judged(plant: Plant) -> Row:
    """Explain a planted run, and return its row."""
    found, control = explained(plant.planted), values_with(configure(*plant.without))
    truth = seconds_of(found.values, plant.metric) - seconds_of(control, plant.metric)
    change = next((each for each in found.causes if each.overrides), None)
    named, best = saving_of(found, change, plant.metric), best_saving(found, plant)
    whole = found.values[plant.metric]
    return {
        "kind": plant.kind,
        "size": plant.size,
        "truth_s": truth,
        "truth_share": truth / seconds_of(found.values, plant.metric),
        **_first(found, ROOTS[plant.kind], truth, WITHIN),
        "change": " ".join(change.overrides) if change else "",
        "saves_share": None if named is None else named / whole,
        "best": best[0],
        "best_saves_share": best[1] / whole,
        "best_change": None
        if best[1] < LEAST_SAVING * whole
        else named is not None and named >= best[1] - max(BEHIND * whole, WITHIN * best[1]),
        "took_s": found.seconds,
    }


def diagnosed(name: str, found: Explained) -> Row:
    """Return the row of a healthy run's explanation."""
    first = found.causes[0] if found.causes else None
    return {
        "run": name,
        "duration_s": found.values["duration"],
        "micro_batches": len(found.run.record.micro_batches),
        "cause": str(first.cause) if first else "none",
        "claimed_s": first.seconds if first else None,
        "claimed_share": first.share if first else None,
        "ill": first is not None,
        "took_s": found.seconds,
    }


def planted_for_real(plant: Plant) -> Row:
    """Run a plant in a real pipeline between two controls, and return its row."""
    before, planted, after = (real_run(plant, is_control=is_control) for is_control in (True, False, True))
    found = explained_record(*planted)
    controls = [values_of(record)["duration"] for record, _ in (before, after)]
    truth = found.values["duration"] - statistics.fmean(controls)
    return {
        "kind": plant.kind,
        "truth_s": truth,
        "truth_share": truth / found.values["duration"],
        "controls_differ_share": abs(controls[1] / controls[0] - 1),
        "controls_ill": sum(bool(explained_record(*control).causes) for control in (before, after)),
        **_first(found, REAL_ROOTS[plant.kind], truth, WITHIN_REAL),
        "change": " ".join(found.causes[0].overrides) if found.causes else "",
        "took_s": found.seconds,
    }


def _first(found: Explained, roots: Collection[Root], truth: float, within: float) -> Row:
    """Compare the first cause with the truth, in seconds.

    `roots` are the correct answers; `within` is the tolerated error as a share.
    """
    first = found.causes[0] if found.causes else None
    error = first.seconds / truth - 1 if first else None
    return {
        "cause": str(first.cause) if first else "none",
        "claimed_s": first.seconds if first else None,
        "low_s": first.low if first else None,
        "high_s": first.high if first else None,
        "error_share": error,
        "right": first is not None and first.cause in roots,
        "within": error is not None and abs(error) <= within,
    }


def _read(overrides: Sequence[str]) -> dict[str, Any]:
    return {key: yaml.safe_load(value) for key, value in (each.split("=", 1) for each in overrides)}


def saving_of(found: Explained, cause: SizedCause | None, metric: str) -> float | None:
    """Simulate a cause's suggested change and return what it saves; None without a change."""
    if cause is None or not cause.overrides:
        return None
    after = values_with(changed_config(found.config, _read(cause.overrides)))
    return found.values[metric] - after[metric]


def best_saving(found: Explained, plant: Plant) -> tuple[str, float]:
    """Return the best single change, undoing the plant or a usual one, and what it saves of the metric.

    A usual change that makes another metric much worse is a trade-off and does not count.
    """
    best = ("", 0.0)
    for overrides in filter(None, (plant.undo, *usual_changes(found.config))):
        try:
            after = values_with(changed_config(found.config, _read([overrides])))
        except (ConfigError, PipelineError):  # it does not fit
            continue
        others = [name for name in METRICS if name != plant.metric]
        is_trade = any(after[name] > (1 + TOLERANCE) * found.values[name] for name in others)
        saves = found.values[plant.metric] - after[plant.metric]
        if saves > best[1] and (overrides == plant.undo or not is_trade):
            best = (overrides, saves)
    return best


def usual_changes(config: SimulateConfig) -> Iterator[str]:
    """Yield single changes to try on any run."""
    policy = config.scheduler
    yield from (f"scheduler={name}" for name in ("equal_time", "token_budget", "sarathi") if name != policy.name)
    for key in ("chunk", "max_batched_tokens"):
        if isinstance(size := getattr(policy, key, None), int):
            yield from (f"scheduler.{key}={int(size * factor)}" for factor in (0.25, 0.5, 2, 4))
    if config.parallel.pp > 1:
        yield f"parallel.depth={config.parallel.pp + 1}"
        if config.parallel.layers is not None:
            yield "parallel.layers=null"


if __name__ == "__main__":
    sys.exit(main())
