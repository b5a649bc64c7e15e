"""`gapless capacity`: the highest request rate of one or several policies that meets an SLO, by simulation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..conf.build import to_mapping
from ..conf.schema import SimulateConfig
from ..conf.tuning import CapacityConfig
from .overrides import command_line
from .progress import Steps, shown, versions
from .prompts import TextInput
from .results import plain
from .turns import labels

if TYPE_CHECKING:
    from ..runtime.pipeline.launcher import Launcher
    from ..runtime.simulation.setting import Setting
    from ..runtime.tuning.demand import Demand
    from ..runtime.tuning.tables import TextTable
    from ..runtime.tuning.trial import Trial


_LEAST_REASON_WIDTH = 24  # letters of the column of reasons
SLO_NOT_MET = 3  # exit code of a search whose SLO no setting meets at any rate


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked search: the setting of each policy, by its label, and the demand of each seed."""

    settings: dict[str, Setting]
    demands: list[Demand]


def prepare(config: CapacityConfig, stdin: TextInput) -> Prepared:
    """Check a search before anything is simulated.

    Raises:
        ConfigError: a policy, the workload, the profile or the hardware is wrong, or the model does not fit.
    """
    from ..runtime.simulation.setting import make_setting
    from ..runtime.tuning.demand import make_demands

    policies = config.policies or (config.scheduler,)
    settings = {}
    for label, policy in zip(labels(policies), policies, strict=True):
        own = SimulateConfig(
            model=config.model, hardware=config.hardware, cluster=config.cluster, parallel=config.parallel,
            scheduler=policy, cache=config.cache, seed=config.seed, workload=config.workload,
            simulation=config.simulation,
        )  # fmt: skip
        settings[label] = make_setting(own)
    plans = [setting.plan for setting in settings.values()]
    more = config.most_seeds - config.seeds if len(settings) > 1 else 0
    room = min(plan.room for plan in plans)
    return Prepared(settings, make_demands(config.workload, plans[0], room, config.seeds, more))


def run(config: CapacityConfig, prepared: Prepared, run_dir: Path, launcher: Launcher | None = None) -> int:
    """Find the capacity of each policy on each seed, and print and write them. Returns the exit code.

    Raises:
        ValueError: what the user can mend.
    """
    from ..runtime.cost.error import error_text
    from ..runtime.run_folder.titles import setting_of
    from ..runtime.tuning.bounds import Bounds
    from ..runtime.tuning.capacity import Interval, SeededCapacities
    from ..runtime.tuning.closest import closest, unmet_note
    from ..runtime.tuning.demand import asked_rate
    from ..runtime.tuning.error_range import error_range, range_note
    from ..runtime.tuning.paired import compare
    from ..runtime.tuning.tables import TextTable, behind_text, limit_text, range_text, rate_text, tie_text

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    settings, demands = prepared.settings, prepared.demands
    names = list(settings)
    with Steps(errors, "capacity") as steps:
        steps.update(names[0], 0, len(names))

        def report(number: int, trial: Trial) -> None:
            word = "carried" if trial.carried else "not carried"
            steps.update(f"{names[number]}: {rate_text(trial.rate)} requests/s {word}", number, len(names))

        by_seed = SeededCapacities(list(settings.values()), demands, config.slo, config.precision, on_trial=report)
        compared = compare(by_seed.rate, len(names), least=min(config.seeds, len(demands)), most=len(demands),
                           resolution=config.precision)  # fmt: skip
        found = dict(zip(names, by_seed.found, strict=True))
        off = {}
        for number, (label, of_seeds) in enumerate(found.items()):
            steps.update(f"{label}: if stage times are off", number, len(names))
            off[label] = error_range(settings[label], demands[0], config.slo, of_seeds, config.precision)
        unmet = {label: settings[label] for label, each in found.items() if not any(one.rate for one in each)}
        if unmet:
            steps.update("which comes closest to the SLO", len(settings), len(settings))
        near = closest(unmet, demands[0], config.slo, Bounds(demands[0], config.slo)) if unmet else []

    several = len(found) > 1 and len(unmet) < len(found)
    rows: list[dict[str, Any]] = []
    lines = []
    for (label, of_seeds), behind, verdict in zip(found.items(), compared.differences, compared.verdicts, strict=True):
        interval = Interval.from_rates([capacity.rate for capacity in of_seeds])
        own = of_seeds[0]
        ttft, tbt = (own.trial.ttft_p99_ms, own.trial.tbt_p99_ms) if own.trial else (None, None)
        rates = " ".join(rate_text(capacity.rate) for capacity in of_seeds)
        less = behind_text(behind, verdict) if several else "-"
        lines.append((label, interval.text, range_text(off[label]), less, _ms(ttft), _ms(tbt), rates, limit_text(own)))
        rows.append({
            "policy": label, "mean": interval.mean, "half_width_95": interval.half,
            "if_times_are_off": None if (known := off[label]) is None else asdict(known),
            "verdict": verdict, "less_than_best": asdict(behind),
            "by_seed": [capacity.rate for capacity in of_seeds], "p99_ttft_ms": ttft, "p99_tbt_ms": tbt,
            "limit": own.why, "not_monotone": any(capacity.not_monotone for capacity in of_seeds),
            "simulations": sum(len(capacity.trials) for capacity in of_seeds),
            "requests": sum(capacity.requests for capacity in of_seeds),
        })  # fmt: skip
    heads = ("policy", "requests/s", "if times are off", "less than the best", "TTFT p99", "TBT p99", "by seed",
             "what keeps it from more")  # fmt: skip
    console.print(Text(f"Simulated: {setting_of(to_mapping(config))}", "bold"), soft_wrap=True)
    shown_rows = TextTable(heads, lines, frozenset({0, 7}), optional_columns=(2, 3, 4, 5, 6))
    title = f"capacity within {slo_text(config.slo)}, {len(demands[0])} requests"
    console.print(terminal_table(shown_rows, title, console.width))
    ties = compared.tied if several else []
    tie_note = tie_text([names[number] for number in ties], [compared.differences[number] for number in ties],
                        "They are in the order in which they were named.")  # fmt: skip
    if tie_note:
        console.print(Text(tie_note, "bold"), soft_wrap=True)
    for label, of_seeds in found.items():
        if any(capacity.not_monotone for capacity in of_seeds):
            console.print(f"{label}: a higher rate passed too, but not one below it: the lower one counts")
        if of_seeds[0].rate > 0.0:
            workload = demands[0].config_at(config.workload, of_seeds[0].rate)
            again = replace(settings[label].config, workload=workload)
            console.print(Text(f"{command_line(again, 'simulate')}"), soft_wrap=True)
    asked = asked_rate(config.workload, demands[0])
    if asked is not None and len(unmet) < len(found):
        carried = [label for label, of_seeds in found.items() if min(one.rate for one in of_seeds) >= asked]
        console.print(
            Text.assemble(
                ("asked    ", "bold"),
                f"{rate_text(asked)} requests/s: ",
                f"carried by {', '.join(carried)}" if carried else "not carried",
            ),
            soft_wrap=True,
        )
    if len(unmet) == len(found):
        console.print(Text(unmet_note(near), "bold"), soft_wrap=True)
    else:
        for approach in near:
            console.print(Text(f"meets the SLO at no rate: {approach.text}"), soft_wrap=True)
    error = settings[names[0]].error
    said = error_text(error)
    note = f"{said}. {range_note(error)}".strip() if len(unmet) < len(found) else f"{said}."
    console.print(Text.assemble(("error    ", "bold"), note), soft_wrap=True)
    numbers = {
        "config": plain(to_mapping(config)), "versions": versions(), "asked_rate": asked, "capacities": rows,
        "cost_error": None if error is None else error.numbers,
        "ties": [names[number] for number in ties], "ties_note": tie_note,
        "closest": [approach.numbers() for approach in near],
    }  # fmt: skip
    (run_dir / "capacity.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    console.print(Text.assemble(("numbers  ", "bold"), shown(run_dir / "capacity.json")), soft_wrap=True)
    return SLO_NOT_MET if len(unmet) == len(found) else 0


def slo_text(slo: Any) -> str:
    """Write an SLO as `TTFT p99 2 s, TBT p99 200 ms`."""
    bounds = (("TTFT", slo.ttft_p99_ms), ("TBT", slo.tbt_p99_ms))
    return ", ".join(f"{name} p99 {_ms(bound)}" for name, bound in bounds if bound is not None)


def _ms(value: float | None) -> str:
    from ..runtime.report.formatting import ms_text

    return ms_text(value)


def terminal_table(rows: TextTable, title: str, width: int) -> Table:
    """Make the terminal's table of `rows`, with the columns for which there is room."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    kept = rows.fitting_columns(width, gap=3, last_width=_LEAST_REASON_WIDTH)
    for number in kept:
        justify: Literal["left", "right"] = "left" if number in rows.left_columns else "right"
        table.add_column(rows.heads[number], justify=justify, no_wrap=number != kept[-1], overflow="fold")
    for row in rows.rows:
        table.add_row(*(Text(row[number]) for number in kept))
    return table
