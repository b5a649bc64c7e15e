"""The Chrome trace: valid for viewers, true to the ledger, arrows from stage to stage, and a cut that it names."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.run_folder import chrome_trace
from gapless.runtime.analysis.run_folder.read import read_run_folder
from gapless.runtime.core.messages import Span
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, FaultRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from tests.support.tiers import examples
from tests.support.trace_format import check_trace

START = 98765.4321  # a monotonic clock's zero is anywhere
CONTENTS = {"prefill": (1, 0), "decode": (0, 2), "mixed": (2, 1), "empty": (0, 0)}  # chunks, decodes


def run_of(num_stages: int, contents: list[str], seconds: list[float], early_wait: float = 0.1) -> RunRecord:
    """Make a run with a micro-batch for each of `contents`; the coordinator waited before the run's first arrival."""
    record = RunRecord(num_stages, 40, requests=[RequestRecord(0, 64, START)])
    free, clock = [START] * num_stages, START
    for number, (kind, length) in enumerate(zip(contents, seconds, strict=True)):
        chunks, decodes = CONTENTS[kind]
        micro_batch = MicroBatchRecord(
            number,
            clock,
            [SegmentRecord(7 + c, 0, 64) for c in range(chunks)],
            DecodesRecord.at([20 + d for d in range(decodes)], [64] * decodes),
            kv_blocks_used=number,
        )
        micro_batch.waits = [
            Wait(clock - early_wait, clock - 0.001, "no_request"),
            Wait(clock - 0.05, clock, "kv_full"),
        ]
        there = clock
        for stage in range(num_stages):
            begin = max(there, free[stage])
            free[stage] = begin + length * (1 + stage % 2)
            record.spans.append(Span(number, stage, there, there, begin, free[stage], free[stage]))
            there = free[stage] + 0.0005
        record.micro_batches.append(micro_batch)
        clock += length
    return record


def written(folder: Path, record: RunRecord) -> dict[str, Any]:
    path = folder / "trace.json.gz"
    chrome_trace.write_trace(path, record, Ledger(record), title="a run")
    loaded = json.loads(gzip.decompress(path.read_bytes()))
    assert isinstance(loaded, dict)
    return loaded


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_stages=st.integers(1, 4),
    batches=st.lists(st.tuples(st.sampled_from([*CONTENTS]), st.floats(0, 0.02)), min_size=1, max_size=12),
    most=st.integers(1, 60),
)
def test_viewers_can_read_it(tmp_path: Path, num_stages: int, batches: list[tuple[str, float]], most: int):
    record = run_of(num_stages, [kind for kind, _ in batches], [seconds for _, seconds in batches])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chrome_trace, "MAX_SLICES", most)
        loaded = written(tmp_path, record)
    check_trace(loaded)
    events, shown = loaded["traceEvents"], min(len(batches), max(1, most // num_stages))
    assert len([e for e in events if e.get("cat") == "compute"]) == shown * num_stages
    arrows = [e for e in events if e.get("cat") == "flow"]
    assert len(arrows) == (shown * num_stages if num_stages > 1 else 0)


def test_slices_tile_the_tracks_and_agree_with_the_ledger(tmp_path: Path):
    record = run_of(3, ["prefill", "mixed", "decode", "decode", "empty", "prefill"], [0.01] * 6)
    events = written(tmp_path, record)["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {1: "stage 0", 2: "stage 1", 3: "stage 2", 4: "coordinator"}
    ledger = Ledger(record)
    for stage in range(3):
        slices = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == stage + 1)
        assert slices[0][0] == 0.0
        assert slices[-1][1] == pytest.approx(ledger.span_seconds * 1e6, abs=0.01)
        assert all(a[1] == pytest.approx(b[0], abs=0.01) for a, b in pairwise(slices))
    idle = [e for e in events if e.get("cat") == "idle"]
    by_name = {str(c): s for c, s in ledger.seconds_by_cause().items() if s}
    assert {n: sum(e["dur"] for e in idle if e["name"] == n) / 1e6 for n in by_name} == pytest.approx(by_name, abs=1e-6)


def test_few_names_and_the_requests_on_every_stage(tmp_path: Path):
    record = run_of(2, ["prefill", "mixed", "decode", "empty"] * 8, [0.01] * 32)
    record.spans += [
        Span(90, stage, *[START + 2 + 0.1 * stage] * 3, *[START + 2.05 + 0.1 * stage] * 2) for stage in (0, 1)
    ]
    events = written(tmp_path, record)["traceEvents"]
    compute = [e for e in events if e.get("cat") == "compute"]
    assert {e["name"] for e in compute} == {"prefill", "mixed", "decode", "empty", "no record"}
    assert {e["name"] for e in events if e["ph"] == "i"} == {"dispatch"}
    for stage in (0, 1):
        mixed = next(e for e in compute if e["tid"] == stage + 1 and e["name"] == "mixed")
        assert mixed["args"]["chunks"] == "request 7 [0:64], request 8 [0:64]"
        assert (mixed["args"]["step"], mixed["args"]["decodes"]) == (1, "20")
    arrows = {(e["id"], e["tid"]): e["ph"] for e in events if e.get("cat") == "flow"}
    assert arrows[1, 1] == "s"
    assert arrows[1, 2] == "f"


def test_waits_before_the_run_are_cut_off(tmp_path: Path):
    loaded = written(tmp_path, run_of(1, ["prefill", "decode"], [0.2, 0.2], early_wait=0.15))
    check_trace(loaded)
    waits = [(e["name"], e["ts"], e["dur"]) for e in loaded["traceEvents"] if e.get("cat") == "wait"]
    assert waits == [
        ("no_request", pytest.approx(50_000), pytest.approx(149_000)),
        ("kv_full", pytest.approx(199_000), pytest.approx(1_000)),
    ]


def test_a_cut_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record = run_of(2, ["prefill"] * 10, [0.01] * 10)
    whole = written(tmp_path, record)
    assert "cut" not in whole["otherData"]
    assert whole["otherData"]["micro_batches_shown"] == 10
    monkeypatch.setattr(chrome_trace, "MAX_SLICES", 8)
    loaded = written(tmp_path, record)
    text = "the first 4 of 10 micro-batches; spans.csv.gz has all"
    assert loaded["otherData"]["cut"] == text
    assert loaded["otherData"]["micro_batches_shown"] == 4
    (mark,) = [e for e in loaded["traceEvents"] if e["name"] == "trace cut here"]
    assert (mark["ph"], mark["s"], mark["args"]["cut"]) == ("i", "g", text)
    assert mark["ts"] == max(e["ts"] + e["dur"] for e in loaded["traceEvents"] if e.get("cat") == "compute")
    (label,) = [e for e in loaded["traceEvents"] if e["name"] == "process_labels"]
    assert label["args"]["labels"] == text


def test_a_recorded_run_of_three_ranks(tmp_path: Path):
    recorded = Path(__file__).parents[1] / "ledger" / "recorded_run"
    loaded = written(tmp_path, read_run_folder(recorded).load())
    check_trace(loaded)
    assert sum(e["ph"] == "f" for e in loaded["traceEvents"]) == loaded["otherData"]["micro_batches"]


def test_faults_are_marks_over_all_tracks(tmp_path: Path):
    record = run_of(2, ["prefill", "decode", "decode"], [0.01] * 3)
    at = START + 0.005
    parts = {"start": 0.4}
    record.faults.append(FaultRecord(1, "process", "rank 1 ended", at, at + 0.001, at + 0.5, parts, [1], 2, 30))
    record.faults.append(FaultRecord(2, "hang", "no progress", at + 0.6, at + 0.7))
    loaded = written(tmp_path, record)
    check_trace(loaded)
    marks = [event for event in loaded["traceEvents"] if event.get("cat") == "fault"]
    assert [(mark["name"], mark["ts"]) for mark in marks] == [
        ("fault (process)", pytest.approx(6e3)),
        ("recovered", pytest.approx(505e3)),
        ("fault (hang)", pytest.approx(705e3)),
    ]
    assert {mark["s"] for mark in marks} == {"g"}
    assert marks[0]["args"] == {"fault": "rank 1 ended", "requests again": 2, "tokens again": 30}
