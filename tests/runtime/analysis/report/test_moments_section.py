"""The sections on blame and on the worst moments: sentences, tables, links that zoom the timeline."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from gapless.runtime.analysis.ledger.blame import Blame
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.report.blame_section import blame_section, blame_table
from gapless.runtime.analysis.report.moments_section import moment_text, moments_section
from gapless.runtime.core.run_record import RunRecord
from tests.runtime.analysis.ledger.test_blame import by_hand
from tests.runtime.analysis.report.test_run_page import page_of, simulated_run
from tests.support.browser import CHROMIUM, DRIVER, browsing
from tests.support.written_runs import analysed


def of(record: RunRecord) -> tuple[Ledger, Blame]:
    ledger = Ledger(record)
    return ledger, Blame.of_run(record, ledger)


def test_tables_name_requests_and_users() -> None:
    record = by_hand()
    record.requests[0].user = "<ann>"
    _, blame = of(record)
    section = blame_section(record, blame)
    assert section.index("request 2 of bob") < section.index("request 0 of &lt;ann&gt;")
    assert "<td>9</td><td>1</td><td>0</td><td>17.00 s</td><td>4.00 s</td>" in section
    assert "<tr><th>bob</th><td>2</td><td>10</td><td>3</td><td>3.00 s</td><td>18.00 s</td>" in section
    console = Console(width=80, record=True)
    console.print(blame_table(record, blame))
    assert "request 2 of bob" in console.export_text()
    for request in record.requests:
        request.user = ""
    assert "<th>user" not in blame_section(record, blame)


def test_nobody_to_blame_and_no_moment_is_no_section() -> None:
    record = RunRecord(1, 10)
    _, blame = of(record)
    assert blame_section(record, blame) == ""
    assert blame_table(record, blame) is None
    assert moments_section(analysed(record, {}), 1.0) == ""


def test_a_moment_in_words() -> None:
    record = simulated_run(4, 200)
    run = analysed(record, {})
    ledger = run.ledger
    assert len(run.moments) == 10
    for moment in run.moments:
        first, second, *rest = moment_text(moment, record, ledger.t0)
        assert first.startswith(f"At {moment.start - ledger.t0:,.2f} s, ")
        assert "times the typical" in first
        assert second.endswith(".")
        assert all(text.startswith("Cost others most: request ") for text in rest)
    section = moments_section(run, ledger.span_seconds)
    assert section.count("<li>") == section.count('href="#t=') == 10
    cut = moments_section(run, 0.0)
    assert cut.count("<li>") == 10
    assert 'href="#t=' not in cut, "what the timeline does not show has no link"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")
def test_links_zoom_the_timeline(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page_of(simulated_run(4, 200)), encoding="utf-8")
    view = "document.querySelector('.picture').dataset.view"
    with browsing(tmp_path) as browser:
        browser.open(file.as_uri())
        browser.until("document.body.dataset.drawn")
        whole = browser.run(f"return {view}")
        address = browser.run("return document.querySelector('.moments a').hash")
        low, high = map(float, address.removeprefix("#t=").split("-"))
        browser.run("document.querySelector('.moments a').click()")
        browser.until(f"{view} !== '{whole}'")
        tick = browser.run("return JSON.parse(document.getElementById('head').textContent).tick")
        seconds = [float(at) * tick for at in browser.run(f"return {view}").split(",")]
        assert seconds == pytest.approx([low, high], abs=1e-5)
        assert browser.run("return Math.abs(document.getElementById('pipeline').getBoundingClientRect().top) < 50")
        browser.open("about:blank")
        browser.open(f"{file.as_uri()}#t=1.25-2.5")
        browser.until(f"({view} || '').split(',').length === 2 && {view} !== '{whole}'")
        seconds = [float(at) * tick for at in browser.run(f"return {view}").split(",")]
        assert seconds == pytest.approx([1.25, 2.5], abs=1e-5)
        assert browser.log == []
