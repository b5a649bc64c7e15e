"""Writes the run folders of fleets: one of each replica, the totals, and a page that compares the replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...conf.workloads import SloConfig
from ..ledger.fleet import Fleet, replica_name
from ..run_folder.files import PREFILL_KEY, replica_folder
from ..run_folder.read import RunFolder
from ..run_folder.titles import is_simulated, title_of
from ..run_folder.write import write_fleet_totals
from .comparison_page import charts_of_drawn, read_drawn_runs, render_comparison
from .metrics import THROUGHPUT
from .png import write_figures
from .run_charts import batch_composition
from .run_groups import RunGroup
from .run_words import words_of_fleet
from .timeline_png import write_timeline
from .write_folder import write_run_folder


def write_fleet_folder(
    path: Path,
    fleet: Fleet,
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    slo: SloConfig | None = None,
    cost_error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the folder of each replica, a fleet's totals, and a page that compares the replicas; return the summary.

    `write_run_data` says what the arguments are.
    """
    fleet.check()
    for number, (record, ledger) in enumerate(zip(fleet.records, fleet.ledgers, strict=True)):
        write_run_folder(
            path / replica_folder(number), record, config=config, versions=versions,
            title=f"{title_of(config)}, {fleet.replica_name(number)}", slo=slo, cost_error=cost_error, ledger=ledger,
        )  # fmt: skip
    summary = write_fleet_totals(path, fleet, config=config, versions=versions, slo=slo, cost_error=cost_error)
    write_fleet_report(path, RunFolder(path, summary), figures=False, words=words_of_fleet(fleet, config))
    return summary


def write_fleet_report(path: Path, folder: RunFolder, *, figures: bool, words: Sequence[str] = ()) -> None:
    """Write the report of a fleet, its replicas side by side, into `path`.

    Args:
        path: Where the report goes.
        folder: The fleet's run folder.
        figures: Whether PNGs are written too.
        words: The sentences that the page begins with.
    """
    num_prefill = folder.summary.get(PREFILL_KEY, 0)
    groups = [RunGroup(replica_name(number, num_prefill), [run]) for number, run in enumerate(folder.replicas)]
    # Of pools, prompt tokens count too: decode replicas alone would be drawn of many.
    sort = "total_token_throughput" if num_prefill else THROUGHPUT.key
    drawn = read_drawn_runs(groups, sort)
    whole = folder.summary if num_prefill else None
    page = render_comparison(groups, drawn, folder.title, sort, compared="replica", whole=whole, words=words)
    (path / "report.html").write_text(page, encoding="utf-8")
    if figures:
        charts, simulated = [*charts_of_drawn(drawn), *batch_composition(drawn.runs)], is_simulated(folder.config)
        write_figures(path / "figures", charts, simulated=simulated)
        suffix = ", simulated" if simulated else ""
        write_timeline(path / "figures" / "timeline.png", {label + suffix: one for label, one in drawn.windows.items()})
