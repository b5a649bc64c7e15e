"""Writes whole run folders: the data, by the room `run_folder`, and the page, `report.html`."""

from __future__ import annotations

from pathlib import Path

from ...core.garbage_collection import without_collector
from ...core.whole_file import write_text
from ..drawing.png import write_figures
from ..drawing.timeline_png import TimelineWindow, write_timeline
from ..explain.analysed_run import AnalysedRun
from ..explain.explain_json import write_explanation
from ..run_folder.files import PREFILL_KEY, replica_folder
from ..run_folder.read import RunFolder
from ..run_folder.titles import is_simulated
from ..run_folder.write import write_fleet_totals, write_run_data
from .comparison_page import draw_runs, render_comparison
from .metrics import THROUGHPUT
from .run_charts import charts_of_run
from .run_groups import RunGroup
from .run_page import render_report

PAGE = "report.html"


@without_collector()
def write_run_folder(path: Path, run: AnalysedRun) -> RunFolder:
    """Write a run's data and page into the folder `path`; for a fleet also one folder per replica inside it.

    If the run was replayed with other settings, `explain.json` has their predicted effects.
    """
    if run.fleet.is_several:
        for number, replica in enumerate(run.replicas):
            write_run_folder(path / replica_folder(number), replica)
        write_fleet_totals(path, run.summary, run.fleet)
    else:
        write_run_data(path, run.summary, run.record, run.ledger, run.blame)
    if run.explanation is not None:
        write_explanation(path, run.explanation)
    write_report(path, run)
    return run.folder(path)


def write_report(path: Path, run: AnalysedRun, *, figures: bool = False) -> None:
    """Write the page of a run, or of a fleet with its replicas side by side; with `figures` also PNGs."""
    if run.fleet.is_several:
        _write_fleet_report(path, run, figures=figures)
        return
    write_text(path / PAGE, render_report(run))
    if figures:
        write_figures(path / "figures", charts_of_run(run.charts), simulated=is_simulated(run.info.config))
        write_timeline(path / "figures" / "timeline.png", {run.title: TimelineWindow.of(run.ledger)})


def _write_fleet_report(path: Path, run: AnalysedRun, *, figures: bool) -> None:
    fleet, has_pools = run.fleet, PREFILL_KEY in run.summary
    groups = [
        RunGroup(fleet.replica_name(number), [replica.folder(path / replica_folder(number))])
        for number, replica in enumerate(run.replicas)
    ]
    # With pools, prompt tokens count too: otherwise, of many replicas, only decode replicas would be drawn.
    sort = "total_token_throughput" if has_pools else THROUGHPUT.key
    drawn = draw_runs(groups, sort)
    whole = run.summary if has_pools else None
    page = render_comparison(groups, drawn, run.title, sort, compared="replica", whole=whole, words=run.words)
    write_text(path / PAGE, page)
    if figures:
        drawn.write(path / "figures", simulated=is_simulated(run.info.config))
