"""`gapless capacity`: the maximum request rate of one or several policies within an SLO, by simulation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ..conf.build import to_mapping
from ..conf.schema import SimulateConfig, recast
from ..conf.tuning import CapacityConfig
from ..runtime.core.numbers import counted, ms_text
from .overrides import command_line
from .progress import Steps, print_files, versions
from .prompts import StandardInput
from .results import plain
from .turns import labels

if TYPE_CHECKING:
    from ..runtime.analysis.drawing.text_table import TextTable
    from ..runtime.pipeline.launcher import Launcher
    from ..runtime.simulation.pipeline.setting import Setting
    from ..runtime.simulation.tuning.closest import Approach
    from ..runtime.simulation.tuning.demand import Demand
    from ..runtime.simulation.tuning.search_result import Ranked
    from ..runtime.simulation.tuning.trial import Trial


SLO_NOT_MET = 3  # exit code if no setting meets the SLO at any rate


@dataclass(frozen=True, slots=True)
class PreparedCapacity:
    """A validated search: the setting of each policy, by label, and the demand of each seed."""

    settings: dict[str, Setting]
    demands: list[Demand]


def prepare(config: CapacityConfig, stdin: StandardInput) -> PreparedCapacity:
    """Validate a search before anything is simulated.

    Raises:
        ConfigError: a policy, the workload, the profile or the hardware is invalid, or the model does not fit.
    """
    from ..runtime.simulation.pipeline.setting import make_setting
    from ..runtime.simulation.tuning.demand import make_demands

    policies = config.policies or (config.scheduler,)
    settings = {}
    for label, policy in zip(labels(policies), policies, strict=True):
        settings[label] = make_setting(recast(config, SimulateConfig, scheduler=policy, policies=()))
    plans = [setting.plan for setting in settings.values()]
    more = config.most_seeds - config.seeds if len(settings) > 1 else 0
    room = min(plan.room for plan in plans)
    return PreparedCapacity(settings, make_demands(config.workload, plans[0], room, config.seeds, more))


@dataclass(frozen=True, slots=True)
class _Search:
    """The results of a search.

    Attributes:
        found: by policy, its capacity on each seed and its difference from the best.
        near: the settings closest to the SLO, of policies that meet it at no rate.
    """

    config: CapacityConfig
    settings: dict[str, Setting]
    demands: list[Demand]
    found: dict[str, Ranked]
    near: list[Approach]

    @property
    def unmet(self) -> list[str]:
        """The policies that meet the SLO at no rate, on any seed."""
        return [label for label, own in self.found.items() if not any(one.rate for one in own.capacities)]

    @property
    def is_met(self) -> bool:
        """Whether at least one policy meets the SLO at some rate."""
        return len(self.unmet) < len(self.found)

    @property
    def ties(self) -> dict[str, Ranked]:
        """The policies that are statistically tied with the best."""
        from ..runtime.simulation.tuning.search_result import tied

        ties = tied(self.found.values()) if self.is_met else []
        return {label: own for label, own in self.found.items() if own in ties}

    @property
    def ties_note(self) -> str:
        """The sentence that names tied policies; empty if none."""
        from ..runtime.analysis.report.tuning.tables import tie_text

        behind = [own.behind for own in self.ties.values()]
        return tie_text(list(self.ties), behind, "They are in the order in which they were named.")

    @property
    def best_note(self) -> str:
        """The sentence that names the best policy and its lead over the next one; empty for one policy."""
        from ..runtime.analysis.report.tuning.tables import difference_text
        from ..runtime.simulation.tuning.error_range import rate_text

        if len(self.found) < 2 or not self.is_met or self.ties:
            return ""
        (best, own), *others = sorted(self.found.items(), key=lambda item: item[1].verdict != "best")
        label, following = min(others, key=lambda item: item[1].behind.mean)
        more, seeds = difference_text(following.behind), counted(following.behind.seeds, "seed")
        return f"best: {best} with {rate_text(own.interval.mean)} requests/s, {more} more than {label} ({seeds}, 95%)"

    @property
    def asked(self) -> float | None:
        """The workload's request rate in requests/s; None if it has none."""
        from ..runtime.simulation.tuning.demand import asked_rate

        return asked_rate(self.config.workload, self.demands[0])


def run(config: CapacityConfig, prepared: PreparedCapacity, run_dir: Path, launcher: Launcher | None = None) -> int:
    """Find, print and write the capacity of each policy on each seed. Return the exit code.

    Raises:
        ValueError: an error that the user can correct.
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    with Steps(errors, "capacity") as steps:
        search = _search(config, prepared, steps)
    for line in _lines(search):
        console.print(line, soft_wrap=isinstance(line, Text))
    from ..runtime.core.whole_file import write_text

    path = run_dir / "capacity.json"
    write_text(path, json.dumps(_numbers(search), indent=2) + "\n")
    print_files(console, ("numbers", path))
    return 0 if search.is_met else SLO_NOT_MET


def _search(config: CapacityConfig, prepared: PreparedCapacity, steps: Steps) -> _Search:
    from ..runtime.simulation.tuning.bounds import Bounds
    from ..runtime.simulation.tuning.capacity import SeededCapacities
    from ..runtime.simulation.tuning.closest import closest
    from ..runtime.simulation.tuning.error_range import error_range, rate_text
    from ..runtime.simulation.tuning.paired import compare
    from ..runtime.simulation.tuning.search_result import Ranked

    settings, demands = prepared.settings, prepared.demands
    names, slo, precision = list(settings), config.slo, config.precision
    steps.update(names[0], 0, len(names))

    def report(number: int, trial: Trial) -> None:
        word = "carried" if trial.carried else "not carried"
        steps.update(f"{names[number]}: {rate_text(trial.rate)} requests/s {word}", number, len(names))

    by_seed = SeededCapacities(list(settings.values()), demands, slo, precision, on_trial=report)
    least = min(config.seeds, len(demands))
    compared = compare(by_seed.rate, len(names), least=least, most=len(demands), resolution=precision)
    found = {}
    for number, (label, capacities) in enumerate(zip(names, by_seed.found, strict=True)):
        steps.update(f"{label}: sensitivity to stage times", number, len(names))
        off = error_range(settings[label], demands[0], slo, capacities, precision)
        behind, verdict = compared.differences[number], compared.verdicts[number]
        found[label] = Ranked(capacities=capacities, behind=behind, verdict=verdict, off=off)
    search = _Search(config, settings, demands, found, [])
    if search.unmet:
        steps.update("settings closest to the SLO", len(settings), len(settings))
        unmet = {label: settings[label] for label in search.unmet}
        search.near.extend(closest(unmet, demands[0], slo, Bounds(demands[0], slo)))
    return search


def _lines(search: _Search) -> Iterator[TextTable | Text]:
    """Yield the terminal output of a search."""
    from ..runtime.analysis.run_folder.titles import setting_of
    from ..runtime.simulation.cost.error import error_text
    from ..runtime.simulation.tuning.closest import unmet_note
    from ..runtime.simulation.tuning.error_range import range_note, rate_text

    config, demand = search.config, search.demands[0]
    yield Text(f"Simulated: {setting_of(to_mapping(config))}", "bold")
    yield _table(search, f"capacity: {asked_text(config, demand)}")
    if note := search.best_note or search.ties_note:
        yield Text(note, "bold")
    for label, own in search.found.items():
        if any(capacity.not_monotone for capacity in own.capacities):
            yield Text(f"{label}: a higher rate also met the SLO, but one in between did not; the lower one counts")
        if own.rate > 0.0:
            workload = demand.config_at(config.workload, own.rate)
            command = command_line(replace(search.settings[label].config, workload=workload), "simulate")
            yield Text(f"simulates {label} at the first seed's rate:\n  {command}")
    asked = search.asked
    if asked is not None and search.is_met:
        carried = [label for label, own in search.found.items() if own.interval.lowest >= asked]
        by = f"carried by {', '.join(carried)}" if carried else "not carried"
        yield Text.assemble(("asked    ", "bold"), f"{rate_text(asked)} requests/s: {by}")
    if search.is_met:
        yield from (Text(f"meets the SLO at no rate: {approach.text}") for approach in search.near)
    else:
        yield Text(unmet_note(search.near), "bold")
    error = next(iter(search.settings.values())).error
    note = f"{error_text(error)}. {range_note(error) if search.is_met else ''}".strip()
    yield Text.assemble(("error    ", "bold"), note)


def _table(search: _Search, title: str) -> TextTable:
    from ..runtime.analysis.drawing.text_table import TextTable
    from ..runtime.analysis.report.tuning.tables import behind_text, limit_text
    from ..runtime.simulation.tuning.error_range import range_text, rate_text

    rows = []
    for label, own in search.found.items():
        trial = own.capacities[0].trial
        rows.append(
            (
                label,
                own.interval.text,
                range_text(own.off),
                behind_text(own.behind, own.verdict) if search.is_met and len(search.found) > 1 else "-",
                ms_text(trial.ttft_p99_ms if trial else None),
                ms_text(trial.tbt_p99_ms if trial else None),
                " ".join(rate_text(capacity.rate) for capacity in own.capacities),
                limit_text(own.capacities[0]),
            )
        )
    optional = ("if times are off", "less than the best", "TTFT p99", "TBT p99", "by seed")
    heads = ("policy", "requests/s", *optional, "what keeps it from more")
    return TextTable(heads, rows, title, ("policy", "what keeps it from more"), optional)


def _numbers(search: _Search) -> dict[str, Any]:
    """Return the contents of `capacity.json`."""
    rows = []
    for label, own in search.found.items():
        trial = own.capacities[0].trial
        further = {
            "p99_ttft_ms": trial and trial.ttft_p99_ms,
            "p99_tbt_ms": trial and trial.tbt_p99_ms,
            "not_monotone": any(capacity.not_monotone for capacity in own.capacities),
            "simulations": sum(len(capacity.trials) for capacity in own.capacities),
            "requests": sum(capacity.requests for capacity in own.capacities),
        }
        rows.append({"policy": label, **own.known, **further})
    error = next(iter(search.settings.values())).error
    return {
        "config": plain(to_mapping(search.config)),
        "versions": versions(),
        "asked_rate": search.asked,
        "capacities": rows,
        "cost_error": None if error is None else error.numbers,
        "ties": list(search.ties),
        "ties_note": search.ties_note,
        "closest": [approach.numbers() for approach in search.near],
    }


def asked_text(config: CapacityConfig, demand: Demand) -> str:
    """Return SLO and workload as `TTFT p99 2 s, TBT p99 200 ms, zipf, 400 requests`."""
    bounds = (("TTFT", config.slo.ttft_p99_ms), ("TBT", config.slo.tbt_p99_ms))
    parts = [f"{name} p99 {ms_text(bound)}" for name, bound in bounds if bound is not None]
    parts.append(config.workload.name)
    if demand.clients is not None:
        parts.append(counted(demand.clients, "client"))
    seconds = config.workload.duration_s
    return ", ".join([*parts, counted(len(demand), "request") if seconds is None else f"{seconds:g} s"])
