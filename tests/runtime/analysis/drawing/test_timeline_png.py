"""The window that `timeline.png` shows: the middle of its run, one length for all runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.runtime.analysis.drawing.timeline_png import TimelineWindow, idle_text, windows_of, write_timeline
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, FaultRecord, MicroBatchRecord, RunRecord, SegmentRecord
from tests.support.hand_made import span
from tests.support.idle_intervals import idle_share
from tests.support.tiers import examples

CHUNK, DECODE = "chunk", "decode"


def run_of(kinds: list[str], lengths: list[float], num_stages: int = 2) -> RunRecord:
    """Make a run whose micro-batches follow each other without another in flight: each stage waits for the others."""
    record = RunRecord(num_stages, 10, requests=[RequestRecord(0, 8, 0.0)])
    clock = 0.0
    for number, (kind, length) in enumerate(zip(kinds, lengths, strict=True)):
        chunks = [SegmentRecord(0, 0, 8)] if kind == CHUNK else []
        decodes = DecodesRecord.at() if chunks else DecodesRecord.at([0], [9])
        record.micro_batches.append(MicroBatchRecord(number, clock, chunks, decodes))
        free = clock
        for stage in range(num_stages):
            record.spans.append(span(number, stage, free, free + length))
            free += length
        clock = clock + length if kind == CHUNK else free
    return record


def serial(record: RunRecord) -> RunRecord:
    """Return the same run with spans that never overlap on a stage."""
    free = [0.0] * record.num_stages
    there: dict[int, float] = {}
    spans = []
    for s in record.spans:
        begin = max(free[s.stage], there.get(s.micro_batch, s.begin), s.begin)
        free[s.stage] = there[s.micro_batch] = begin + s.end - s.begin
        spans.append(span(s.micro_batch, s.stage, begin, free[s.stage]))
    record.spans = spans
    return record


runs = st.lists(st.tuples(st.sampled_from([CHUNK, DECODE]), st.floats(0.01, 1.0)), min_size=1, max_size=30).map(
    lambda batches: Ledger(serial(run_of([kind for kind, _ in batches], [length for _, length in batches])))
)


@settings(max_examples=examples(60))
@given(runs, st.floats(0.01, 1.2))
def test_the_idle_share_of_a_window_in_the_middle(ledger: Ledger, part: float):
    run, seconds = TimelineWindow.of(ledger), part * ledger.span_seconds
    start, end = run.middle(seconds)
    assert 0.0 <= start < end <= ledger.span_seconds + 1e-9
    assert end - start == pytest.approx(min(seconds, ledger.span_seconds))
    idle = 0.0
    for columns in ledger.idle_columns:
        begins, ends = ((side - ledger.t0).clip(start, end) for side in (columns.start, columns.end))
        idle += float((ends - begins).sum())
    assert run.idle_share(start, end) == pytest.approx(idle / (end - start) / ledger.num_stages, abs=1e-9)


@settings(max_examples=examples(30))
@given(st.lists(runs, min_size=1, max_size=3))
def test_windows_of_compared_runs_are_of_one_length(ledgers: list[Ledger]):
    windows = windows_of([TimelineWindow.of(ledger) for ledger in ledgers])
    length = max(end - start for start, end in windows)
    for (start, end), ledger in zip(windows, ledgers, strict=True):
        assert end - start == pytest.approx(min(length, ledger.span_seconds))


def test_a_window_s_title_has_its_idle_share_and_the_run_s(tmp_path: Path):
    kinds = [DECODE, CHUNK] * 60
    ledger = Ledger(serial(run_of(kinds, [0.1] * len(kinds))))
    run = TimelineWindow.of(ledger)
    ((start, end),) = windows_of([run])
    assert start == pytest.approx(ledger.span_seconds - end)
    assert f"{100 * idle_share(ledger):.1f}% of the run" in idle_text(run, start, end)
    given_window = TimelineWindow.of(ledger, (1.0, 2.0))
    assert windows_of([given_window, run])[0] == (1.0, 2.0)
    picture = write_timeline(tmp_path / "timeline.png", {"a": run, "b": given_window})
    assert picture.stat().st_size > 10_000


def test_axes_have_the_runs_own_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k))[1])
    kinds = [CHUNK, DECODE] * 60
    ledger = Ledger(serial(run_of(kinds, [0.1] * len(kinds))))
    runs = {"a": TimelineWindow.of(ledger), "b": TimelineWindow.of(ledger)}
    windows = windows_of(list(runs.values()))
    write_timeline(tmp_path / "timeline.png", runs)
    axes = figures[0].axes
    assert [ax.get_xlim() for ax in axes] == [pytest.approx(window) for window in windows]
    assert windows[0][0] > 0
    assert "seconds from the run's start" in axes[-1].get_xlabel()
    assert "(each run's middle " in axes[-1].get_xlabel()
    assert "of the run" in axes[0].get_title("right")


def test_faults_are_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k))[1])
    record = run_of([CHUNK, DECODE] * 10, [0.1] * 20)
    record.faults = [
        FaultRecord(1, "process", "rank 1 died", 1.0, 1.1, 1.4),
        FaultRecord(2, "hang", "stage 0 hangs", 90.0, 91.0),
    ]
    ledger = Ledger(serial(record))
    write_timeline(tmp_path / "timeline.png", {"a": TimelineWindow.of(ledger, (1.05, 2.0))})
    (axes,) = figures[0].axes
    assert [(line.get_xdata()[0], line.get_linestyle()) for line in axes.lines] == [
        (pytest.approx(1.1), "-"),
        (pytest.approx(1.4), "--"),
    ]
    words = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert words[-2:] == ["fault (process)", "recovered"]
