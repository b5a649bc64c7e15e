"""`gapless capacity`: the highest request rate of one or several policies that meets an SLO, by simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from ..runtime.tuning.capacity import Capacity
    from ..runtime.tuning.demand import Demand
    from ..runtime.tuning.trial import Setting


def check(config: CapacityConfig, stdin: TextInput) -> None:
    """What can be said before anything is simulated.

    Raises:
        ConfigError: of a policy, the workload, the memory, the profile or the hardware.
    """
    _settings(config)


def run(config: CapacityConfig, run_dir: Path, stdin: TextInput, launcher: Launcher | None = None) -> None:
    """Finds the capacity of each policy on each seed, and prints and writes them.

    Raises:
        ValueError: what the user can mend.
    """
    from ..runtime.tuning.capacity import Interval, capacities
    from ..runtime.tuning.tables import limit_text, rate_text

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    settings, demands = _settings(config)
    found: dict[str, list[Capacity]] = {}
    with Steps(errors, "capacity") as steps:
        for number, (label, setting) in enumerate(settings.items()):
            steps.update(label, number, len(settings))

            def told(trial: Any, label: str = label, number: int = number) -> None:
                word = "carried" if trial.carried else "not carried"
                steps.update(f"{label}: {rate_text(trial.rate)} requests/s {word}", number, len(settings))

            found[label] = capacities(setting, demands, config.slo, config.precision, on_trial=told)

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left",
                  title=f"capacity within {slo_text(config.slo)}, {len(demands[0])} requests")  # fmt: skip
    table.add_column("", overflow="fold")
    for head in ("requests/s", "by seed", "TTFT p99", "TBT p99"):
        table.add_column(head, justify="right")
    table.add_column("what keeps it from more")
    rows = []
    for label, of_seeds in found.items():
        interval = Interval.from_rates([capacity.rate for capacity in of_seeds])
        own = of_seeds[0]
        ttft, tbt = (own.trial.ttft_p99_ms, own.trial.tbt_p99_ms) if own.trial else (None, None)
        by_seed = " ".join(rate_text(capacity.rate) for capacity in of_seeds)
        table.add_row(label, interval.text, by_seed, _ms(ttft), _ms(tbt), limit_text(own))
        rows.append({
            "policy": label, "mean": interval.mean, "half_width_95": interval.half,
            "by_seed": [capacity.rate for capacity in of_seeds], "p99_ttft_ms": ttft, "p99_tbt_ms": tbt,
            "limit": own.why, "not_monotone": any(capacity.not_monotone for capacity in of_seeds),
            "simulations": sum(len(capacity.trials) for capacity in of_seeds),
            "requests": sum(capacity.requests for capacity in of_seeds),
        })  # fmt: skip
    console.print(table)
    for label, of_seeds in found.items():
        if any(capacity.not_monotone for capacity in of_seeds):
            console.print(f"{label}: a higher rate passed too, but not one below it: the lower one counts")
        if of_seeds[0].rate > 0.0:
            workload = demands[0].config_at(config.workload, of_seeds[0].rate)
            again = replace(settings[label].config, workload=workload)
            console.print(Text(f"{command_line(again, 'simulate')}"), soft_wrap=True)
    told_all = {"config": plain(to_mapping(config)), "versions": versions(), "capacities": rows}
    (run_dir / "capacity.json").write_text(json.dumps(told_all, indent=2) + "\n", encoding="utf-8")
    console.print(Text.assemble(("numbers  ", "bold"), shown(run_dir / "capacity.json")), soft_wrap=True)


def slo_text(slo: Any) -> str:
    """`TTFT p99 2 s, TBT p99 200 ms`."""
    bounds = (("TTFT", slo.ttft_p99_ms), ("TBT", slo.tbt_p99_ms))
    return ", ".join(f"{name} p99 {_ms(bound)}" for name, bound in bounds if bound is not None)


def _settings(config: CapacityConfig) -> tuple[dict[str, Setting], list[Demand]]:
    from ..runtime.tuning.demand import make_demands
    from ..runtime.tuning.trial import make_setting

    policies = config.policies or (config.scheduler,)
    settings = {}
    for label, policy in zip(labels(policies), policies, strict=True):
        own = SimulateConfig(
            model=config.model, hardware=config.hardware, parallel=config.parallel, scheduler=policy,
            cache=config.cache, seed=config.seed, workload=config.workload, simulation=config.simulation,
        )  # fmt: skip
        settings[label] = make_setting(own)
    plan = next(iter(settings.values())).plan
    context = min(
        min(setting.plan.max_model_len, setting.plan.num_blocks * config.cache.block_size)
        for setting in settings.values()
    )
    return settings, make_demands(config.workload, plan, context, config.seeds)


def _ms(value: float | None) -> str:
    from ..runtime.report.formatting import ms_text

    return ms_text(value)
