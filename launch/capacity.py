"""`gapless capacity`: the highest request rate of one or several policies that meets an SLO, by simulation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..conf.build import to_mapping
from ..conf.schema import SimulateConfig, recast
from ..conf.tuning import CapacityConfig
from ..runtime.core.numbers import counted
from ..runtime.drawing.formatting import ms_text
from .overrides import command_line
from .progress import Steps, print_files, versions
from .prompts import StandardInput
from .results import plain
from .turns import labels

if TYPE_CHECKING:
    from ..runtime.pipeline.launcher import Launcher
    from ..runtime.simulation.setting import Setting
    from ..runtime.tuning.closest import Approach
    from ..runtime.tuning.demand import Demand
    from ..runtime.tuning.search_result import Ranked
    from ..runtime.tuning.tables import TextTable
    from ..runtime.tuning.trial import Trial


_LEAST_REASON_WIDTH = 24  # characters of the last column, which says why a rate is not higher
SLO_NOT_MET = 3  # exit code of a search whose SLO no setting meets at any rate


@dataclass(frozen=True, slots=True)
class PreparedCapacity:
    """A checked search: the setting of each policy, by the policy's label, and the demand of each seed."""

    settings: dict[str, Setting]
    demands: list[Demand]


def prepare(config: CapacityConfig, stdin: StandardInput) -> PreparedCapacity:
    """Check a search before anything is simulated.

    Raises:
        ConfigError: a policy, the workload, the profile or the hardware is wrong, or the model does not fit.
    """
    from ..runtime.simulation.setting import make_setting
    from ..runtime.tuning.demand import make_demands

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
        found: by policy, its capacity on each seed, beside the others.
        near: the settings that come closest to the SLO, of policies that meet it at no rate.
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
        """The policies that cannot be told apart from the best."""
        from ..runtime.tuning.search_result import tied

        ties = tied(self.found.values()) if self.is_met else []
        return {label: own for label, own in self.found.items() if own in ties}

    @property
    def ties_note(self) -> str:
        """The sentence that names the policies that cannot be told apart; empty if there are none."""
        from ..runtime.tuning.tables import tie_text

        behind = [own.behind for own in self.ties.values()]
        return tie_text(list(self.ties), behind, "They are in the order in which they were named.")

    @property
    def best_note(self) -> str:
        """The sentence that names the best policy, and how far the next one is behind it; empty for one policy."""
        from ..runtime.tuning.tables import difference_text, rate_text

        if len(self.found) < 2 or not self.is_met or self.ties:
            return ""
        (best, own), *others = sorted(self.found.items(), key=lambda item: item[1].verdict != "best")
        label, following = min(others, key=lambda item: item[1].behind.mean)
        more, seeds = difference_text(following.behind), counted(following.behind.seeds, "seed")
        return f"best: {best} with {rate_text(own.interval.mean)} requests/s, {more} more than {label} ({seeds}, 95%)"

    @property
    def asked(self) -> float | None:
        """The rate that the workload asks for, in requests/s; None if it asks for none."""
        from ..runtime.tuning.demand import asked_rate

        return asked_rate(self.config.workload, self.demands[0])


def run(config: CapacityConfig, prepared: PreparedCapacity, run_dir: Path, launcher: Launcher | None = None) -> int:
    """Find the capacity of each policy on each seed, print and write them, and return the exit code.

    Raises:
        ValueError: what the user can correct.
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    with Steps(errors, "capacity") as steps:
        search = _search(config, prepared, steps)
    for line in _lines(search, console.width):
        console.print(line, soft_wrap=isinstance(line, Text))
    from ..runtime.run_folder.files import write_text

    path = run_dir / "capacity.json"
    write_text(path, json.dumps(_numbers(search), indent=2) + "\n")
    print_files(console, ("numbers", path))
    return 0 if search.is_met else SLO_NOT_MET


def _search(config: CapacityConfig, prepared: PreparedCapacity, steps: Steps) -> _Search:
    from ..runtime.tuning.bounds import Bounds
    from ..runtime.tuning.capacity import SeededCapacities
    from ..runtime.tuning.closest import closest
    from ..runtime.tuning.error_range import error_range
    from ..runtime.tuning.paired import compare
    from ..runtime.tuning.search_result import Ranked
    from ..runtime.tuning.tables import rate_text

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
        steps.update(f"{label}: if stage times are off", number, len(names))
        off = error_range(settings[label], demands[0], slo, capacities, precision)
        behind, verdict = compared.differences[number], compared.verdicts[number]
        found[label] = Ranked(capacities=capacities, behind=behind, verdict=verdict, off=off)
    search = _Search(config, settings, demands, found, [])
    if search.unmet:
        steps.update("which comes closest to the SLO", len(settings), len(settings))
        unmet = {label: settings[label] for label in search.unmet}
        search.near.extend(closest(unmet, demands[0], slo, Bounds(demands[0], slo)))
    return search


def _lines(search: _Search, width: int) -> Iterator[Table | Text]:
    """Yield what the terminal shows of a search."""
    from ..runtime.cost.error import error_text
    from ..runtime.run_folder.titles import setting_of
    from ..runtime.tuning.closest import unmet_note
    from ..runtime.tuning.error_range import range_note
    from ..runtime.tuning.tables import rate_text

    config, demand = search.config, search.demands[0]
    yield Text(f"Simulated: {setting_of(to_mapping(config))}", "bold")
    yield terminal_table(_rows(search), f"capacity: {asked_text(config, demand)}", width)
    if note := search.best_note or search.ties_note:
        yield Text(note, "bold")
    for label, own in search.found.items():
        if any(capacity.not_monotone for capacity in own.capacities):
            yield Text(f"{label}: a higher rate passed too, but a rate between the two failed: the lower one counts")
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


def _rows(search: _Search) -> TextTable:
    from ..runtime.tuning.tables import TextTable, behind_text, limit_text, range_text, rate_text

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
    heads = ("policy", "requests/s", "if times are off", "less than the best", "TTFT p99", "TBT p99", "by seed")
    return TextTable((*heads, "what keeps it from more"), rows, frozenset({0, 7}), optional_columns=(2, 3, 4, 5, 6))


def _numbers(search: _Search) -> dict[str, Any]:
    """Return what `capacity.json` holds."""
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
    """Write what a setting must carry as `TTFT p99 2 s, TBT p99 200 ms, zipf, 400 requests`."""
    bounds = (("TTFT", config.slo.ttft_p99_ms), ("TBT", config.slo.tbt_p99_ms))
    parts = [f"{name} p99 {ms_text(bound)}" for name, bound in bounds if bound is not None]
    parts.append(config.workload.name)
    if demand.clients is not None:
        parts.append(counted(demand.clients, "client"))
    seconds = config.workload.duration_s
    return ", ".join([*parts, counted(len(demand), "request") if seconds is None else f"{seconds:g} s"])


def terminal_table(rows: TextTable, title: str, width: int) -> Table:
    """Make the terminal's table of `rows`, with the columns that fit into `width` characters.

    Where not even the least columns fit, texts on the left are broken between words too.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    kept = rows.fitting_columns(width, gap=3, last_width=_LEAST_REASON_WIDTH)
    is_tight = rows.letters(kept[:-1], 3) + _LEAST_REASON_WIDTH > width
    for number in kept:
        justify: Literal["left", "right"] = "left" if number in rows.left_columns else "right"
        may_break = number == kept[-1] or (is_tight and number in rows.left_columns)
        table.add_column(rows.heads[number], justify=justify, no_wrap=not may_break, overflow="fold")
    for row in rows.rows:
        table.add_row(*(Text(row[number]) for number in kept))
    return table
