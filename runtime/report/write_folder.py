"""Writes whole run folders: the data, as the room `run_folder` writes it, and the page, `report.html`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...conf.workloads import SloConfig
from ..core.garbage_collection import without_collector
from ..core.run_record import RunRecord
from ..ledger.advice import Advice
from ..ledger.blame import Blame
from ..ledger.ledger import Ledger
from ..run_folder.read import RunFolder
from ..run_folder.write import write_run_data
from .chart_data import chart_data
from .run_page import render_report
from .run_words import words_of_run


@without_collector()
def write_run_folder(
    path: Path,
    record: RunRecord,
    *,
    config: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    title: str | None = None,
    slo: SloConfig | None = None,
    cost_error: Mapping[str, Any] | None = None,
    ledger: Ledger | None = None,
    advise: Callable[[RunFolder], Sequence[Advice] | None] = lambda folder: None,
) -> dict[str, Any]:
    """Write a run's data and its report.html into the folder `path`; returns what summary.json holds.

    `write_run_data` says what the other arguments are.

    Args:
        advise: gives advice on the run, whose data are in the folder by then, for the sentences of the page.
    """
    ledger = ledger or Ledger(record)
    blame = Blame.of_run(record, ledger) if "requests" not in record.unknown else None
    summary = write_run_data(
        path, record, config=config, versions=versions, title=title, slo=slo, cost_error=cost_error, ledger=ledger,
        blame=blame,
    )  # fmt: skip
    words = words_of_run(record, ledger, config, advise(RunFolder(path, summary)))
    page = render_report(record, ledger, summary, chart_data(record, ledger), words, blame)
    (path / "report.html").write_text(page, encoding="utf-8")
    return summary
