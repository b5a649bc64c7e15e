"""The run folder: its files, and the same ledger from what is read back."""

from __future__ import annotations

import csv
import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gapless.conf.errors import ConfigError
from gapless.conf.workloads import SloConfig
from gapless.runtime.analysis.ledger.blame import Blame
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.analysis.run_folder.read import read_run_folder
from gapless.runtime.analysis.run_folder.spans_csv import SPAN_COLUMNS
from gapless.runtime.analysis.run_folder.titles import comparison_title, title_of
from gapless.runtime.core.messages import Span
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, FaultRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from tests.support.hand_made import close_to, floor
from tests.support.idle_intervals import idle_of
from tests.support.written_runs import write_run

START = 98765.4321  # a monotonic clock's zero is anywhere


@pytest.fixture
def record() -> RunRecord:
    """Return a run of two stages and 30 micro-batches: three prompts in chunks, then decodes.

    One request is aborted before it began. From micro-batch 5 on times were predicted, 1 ms short.
    """
    record = RunRecord(2, 40, notes=["chunk=auto picked 64"], stage_weights=[[0.01, 0.003], [0.011, 0.003]])
    record.floors = [floor(slow_reason="no kernels"), floor(window=100)]
    record.requests = [RequestRecord(r, 64 * (r + 2), START + 0.1 * r, first_dispatched=START + 0.1) for r in range(3)]
    free, clock, done = [START, START], START + 0.1, START
    for number in range(30):
        micro_batch = MicroBatchRecord(
            number, clock, [], DecodesRecord.at(), kv_blocks_used=number, num_waiting=3 - number // 10
        )
        micro_batch.num_running = 2
        micro_batch.sampled_rows = 1
        micro_batch.drafts, micro_batch.accepted = number, number // 2
        if number % 10 < 3:
            micro_batch.chunks = [SegmentRecord(number // 10, 64 * (number % 10), 64)]
        micro_batch.decodes = DecodesRecord.of(SegmentRecord(r, 64 * (r + 2) + number, 1) for r in range(number // 10))
        if number % 4 == 3:
            micro_batch.waits = [
                Wait(clock - 0.02, clock - 0.005, "in_flight"),
                Wait(clock - 0.003, clock - 0.001, "kv_full"),
            ]
        there = clock
        for stage in range(2):
            begin = max(there, free[stage])
            free[stage] = begin + 0.01 + 0.003 * len(micro_batch.chunks) + 0.001 * stage
            record.spans.append(Span(number, stage, there, there, begin, free[stage], free[stage] + 1e-4))
            there = free[stage] + 0.002
        if number >= 5:
            micro_batch.predicted = [
                round(0.009 + 0.003 * len(micro_batch.chunks) + 0.001 * stage, 9) for stage in range(2)
            ]
        micro_batch.completed = done = free[1]
        clock = max(clock + 0.003, free[0] - (0 if number % 4 else 0.004)) + (0.02 if number % 4 == 2 else 0.0)
        for part in micro_batch.decodes:
            record.requests[part.request].token_times.append(done)
        record.micro_batches.append(micro_batch)
    for request in record.requests[:2]:
        request.finished, request.finish_reason = done, "length"
    record.requests[0].preemptions, record.requests[1].user = 1, "ann"
    record.requests.append(RequestRecord(3, 10, START + 0.3, finished=START + 0.35, finish_reason="abort"))
    return record


@pytest.fixture
def folder(record: RunRecord, tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "a"
    write_run(path, record, {"model": {"name": "tiny"}}, versions={"gapless": "0.1.0"}, title="a run")
    return path


def test_files(folder: Path):
    names = {"requests.csv", "spans.csv.gz", "record.jsonl.gz", "summary.json", "trace.json.gz", "report.html"}
    names |= {"stage_times.json"}
    assert {file.name for file in folder.iterdir()} == names
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<title>a run</title>" in page
    assert "stage 1, mixed" in page, "compute beside its machine"


def test_requests(folder: Path, record: RunRecord):
    ledger = Ledger(record)
    with (folder / "requests.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["request"]) for row in rows] == [0, 1, 2, 3]
    first, second, _, aborted = rows
    request = record.requests[1]
    assert float(second["arrival_s"]) == pytest.approx(0.1)
    assert float(second["ttft_ms"]) == pytest.approx((request.token_times[0] - request.arrival) * 1e3, abs=1e-2)
    assert float(second["e2el_ms"]) == pytest.approx((request.token_times[-1] - request.arrival) * 1e3, abs=1e-2)
    gaps = [b - a for a, b in pairwise(request.token_times)]
    assert float(second["mean_tbt_ms"]) == pytest.approx(sum(gaps) / len(gaps) * 1e3, abs=1e-2)
    assert float(second["max_tbt_ms"]) == pytest.approx(max(gaps) * 1e3, abs=1e-2)
    assert float(second["bubble_ms"]) == pytest.approx(ledger.bubble_of_request(1) * 1e3, abs=1e-2)
    assert (first["preemptions"], first["finish_reason"], first["output_tokens"]) == ("1", "length", "20")
    assert (aborted["ttft_ms"], aborted["max_tbt_ms"], aborted["finish_reason"]) == ("", "", "abort")
    assert [row["user"] for row in rows] == ["", "ann", "", ""]
    blame = Blame.of_run(record, ledger)
    for name, charges in (("ttft", blame.ttft), ("tbt", blame.tbt)):
        costs = [float(row[f"cost_others_{name}_ms"]) for row in rows]
        assert costs == pytest.approx(1e3 * charges.cost, abs=1e-3)
        assert max(costs) > 0


def test_spans(folder: Path, record: RunRecord):
    ledger = Ledger(record)
    with gzip.open(folder / "spans.csv.gz", "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == SPAN_COLUMNS
    assert [(int(row["step"]), int(row["stage"])) for row in rows] == [(i // 2, i % 2) for i in range(60)]
    row = rows[2 * 12 + 1]  # micro-batch 12 on stage 1: the third chunk of request 1, a decode of request 0
    assert (row["prefill_tokens"], row["decode_tokens"], row["chunk_prefix"]) == ("64", "1", "128")
    assert int(row["decode_context"]) == record.micro_batches[12].decode_context == 128 + 12 + 1
    span = next(s for s in record.spans if (s.micro_batch, s.stage) == (12, 1))
    assert float(row["begin"]) == pytest.approx(span.begin - ledger.t0, abs=1e-8)
    idle_after = [sum(i.seconds for i in idle_of(ledger) if i.stage == s and i.micro_batch is None) for s in range(2)]
    for stage in range(2):
        before = sum(float(row["idle_before_ms"]) for row in rows if int(row["stage"]) == stage)
        total = sum(ledger.seconds_by_cause(stage).values()) - idle_after[stage]
        assert before == pytest.approx(total * 1e3)
    assert rows[0]["idle_cause"] == "fill_drain"
    assert all((float(row["idle_before_ms"]) > 0) == bool(row["idle_cause"]) for row in rows)
    assert [row["predicted_ms"] for row in rows[8:12]] == ["", "", "9", "10"]


def test_summary(folder: Path, record: RunRecord):
    summary = json.loads((folder / "summary.json").read_text())
    assert {k: summary[k] for k in summarize(Fleet([record]))} == summarize(Fleet([record]))
    assert (summary["title"], summary["completed"], summary["failed"]) == ("a run", 2, 2)
    assert (summary["config"], summary["versions"]) == ({"model": {"name": "tiny"}}, {"gapless": "0.1.0"})


def test_read_back(folder: Path, record: RunRecord):
    again = read_run_folder(folder)
    assert (again.title, again.path) == ("a run", folder)
    loaded = again.load()
    before, after = Ledger(record), Ledger(loaded)
    after.check()
    assert after.t0 == 0.0
    assert after.span_seconds == pytest.approx(before.span_seconds, abs=1e-8)
    for stage in range(2):
        assert after.seconds_by_cause(stage) == pytest.approx(before.seconds_by_cause(stage), abs=1e-6)
    old, new = summarize(Fleet([record], ledgers=[before])), summarize(Fleet([loaded], ledgers=[after]))
    for summary in (old, new):
        assert summary.pop("bubble_seconds")
    assert old.pop("notes") == new.pop("notes") == ["chunk=auto picked 64"]
    assert old.pop("faults") == new.pop("faults") == []
    assert old.pop("stragglers") == new.pop("stragglers") == []
    compute = [summary.pop("compute") for summary in (old, new)]
    assert loaded.floors == record.floors
    assert len(compute[0]) >= 2
    assert compute[1] == close_to(compute[0])
    old_error, new_error = old.pop("prediction_error"), new.pop("prediction_error")
    assert new_error == pytest.approx(old_error, rel=1e-5)
    old_busy, new_busy = old.pop("stage_busy_fraction"), new.pop("stage_busy_fraction")
    assert new == pytest.approx(old, rel=1e-5)
    assert new_busy == pytest.approx(old_busy, rel=1e-5)
    assert [s.chunks for s in loaded.micro_batches] == [s.chunks for s in record.micro_batches]
    assert [s.predicted for s in loaded.micro_batches] == [s.predicted for s in record.micro_batches]
    assert [s.sampled_rows for s in loaded.micro_batches] == [1] * 30
    assert [(s.drafts, s.accepted) for s in loaded.micro_batches] == [(number, number // 2) for number in range(30)]
    assert [r.user for r in loaded.requests] == ["", "ann", "", ""]
    assert loaded.stage_weights == record.stage_weights
    assert [len(s.waits) for s in loaded.micro_batches] == [len(s.waits) for s in record.micro_batches]


def test_written_again_it_is_the_same(folder: Path, tmp_path: Path):
    again = read_run_folder(folder)
    write_run(tmp_path / "b", again.load(), again.summary["config"])
    assert read_run_folder(tmp_path / "b").title == "gapless: tiny"
    assert (tmp_path / "b" / "requests.csv").read_text() == (folder / "requests.csv").read_text()


def test_a_folder_of_before_predictions(folder: Path, record: RunRecord):
    """Without the columns and lines that came later, what is left reads as before."""
    (folder / "stage_times.json").unlink()
    with gzip.open(folder / "spans.csv.gz", "rt", newline="") as file:
        rows = [row[:-1] for row in csv.reader(file)]
    with gzip.open(folder / "spans.csv.gz", "wt", newline="") as file:
        csv.writer(file).writerows(rows)
    with gzip.open(folder / "record.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    keep = {"run": 3, "step": 10}
    with gzip.open(folder / "record.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(line[: keep.get(line[0])]) + "\n" for line in lines)
    loaded = read_run_folder(folder).load()
    assert (loaded.notes, loaded.stage_weights, loaded.micro_batches[9].predicted) == ([], None, None)
    assert Ledger(loaded).span_seconds == pytest.approx(Ledger(record).span_seconds, abs=1e-8)


def test_the_record_is_read_when_it_is_asked_for(folder: Path):
    (folder / "spans.csv.gz").write_bytes(b"")
    assert read_run_folder(folder).summary["completed"] == 2
    with pytest.raises(ConfigError, match=r"spans\.csv\.gz: damaged"):
        read_run_folder(folder).load()


def test_stage_times(folder: Path, record: RunRecord):
    assert json.loads((folder / "stage_times.json").read_text())["weights"] == record.stage_weights


def test_goodput(record: RunRecord, tmp_path: Path):
    slo = SloConfig(ttft_ms=(record.requests[1].token_times[0] - record.requests[1].arrival) * 1e3 - 1)
    summary = write_run(tmp_path, record, {"seed": 1}, slo=slo).summary
    assert summary["request_goodput"] == pytest.approx(1 / summary["duration"])
    assert summary["config"]["slo"]["ttft_ms"] == slo.ttft_ms


def test_what_is_no_run_folder(tmp_path: Path, folder: Path):
    with pytest.raises(ConfigError, match="not a run folder: it has no summary"):
        read_run_folder(tmp_path)
    damaged = folder / "record.jsonl.gz"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"record\.jsonl\.gz: damaged"):
        read_run_folder(folder).load()
    with gzip.open(damaged, "wb") as file:
        file.write(b'["step",1]\n')
    with pytest.raises(ConfigError, match=r"record\.jsonl\.gz: damaged"):
        read_run_folder(folder).load()


def test_an_empty_run(tmp_path: Path):
    write_run(tmp_path, RunRecord(2, 0), {})
    assert read_run_folder(tmp_path).load() == RunRecord(2, 0)


def simulated(policy: str, *, tp: int = 8, pp: int = 1, replicas: int = 1) -> dict[str, Any]:
    return {
        "model": {"name": "llama2-70b"},
        "hardware": {"name": "a100-80g"},
        "parallel": {"tp": tp, "pp": pp},
        "scheduler": {"name": policy},
        "simulation": {"replicas": replicas},
    }


def test_a_simulated_run_says_so_with_its_model_hardware_and_grid():
    assert title_of(simulated("sarathi")) == "Simulated: sarathi, llama2-70b on 8 x a100-80g, tp 8, pp 1"
    fleet = title_of(simulated("sarathi", tp=4, pp=2, replicas=2))
    assert fleet == "Simulated: sarathi, llama2-70b on 16 x a100-80g, tp 4, pp 2, 2 replicas"
    real = {key: value for key, value in simulated("sarathi").items() if key != "simulation"}
    assert title_of(real) == "gapless: llama2-70b, sarathi"


def test_a_comparison_of_simulations_says_so():
    both = [simulated("sarathi"), simulated("orca_best")]
    names = ["sarathi", "orca_best"]
    title = comparison_title(both, names)
    assert title == "Simulated: sarathi, orca_best, llama2-70b on 8 x a100-80g, tp 8, pp 1"
    both[1]["parallel"] = {"tp": 4, "pp": 2}
    assert comparison_title(both, names) == "Simulated: sarathi, orca_best, llama2-70b on a100-80g"
    del both[1]["simulation"]
    assert comparison_title(both, names).startswith("Simulated and measured: ")
    assert comparison_title([{}, {}], ["a", "b"]) == "gapless: a, b"


def test_faults_are_kept(record: RunRecord, tmp_path: Path):
    fault = FaultRecord(
        1, "process", "rank 1 ended", START + 0.25, START + 0.5, START + 1.0, {"start": 1.25}, [1, 3], 2, 77
    )
    record.faults = [fault, FaultRecord(2, "hang", "nothing comes", START + 1.5, START + 1.75)]
    ledger = Ledger(record)
    summary = write_run(tmp_path, record, {}).summary
    loaded = read_run_folder(tmp_path).load()
    first, second = loaded.faults
    assert (first.since, first.detected, first.up) == pytest.approx(
        [t - ledger.t0 for t in (fault.since, fault.detected, fault.up)]
    )
    assert msgspec.structs.replace(first, since=fault.since, detected=fault.detected, up=fault.up) == fault
    assert (second.up, second.parts, second.ranks) == (None, {}, [])
    assert summary["faults"][0]["parts"] == pytest.approx({"detect": 0.25, "start": 1.25})
    assert Ledger(loaded).seconds_by_cause() == pytest.approx(ledger.seconds_by_cause(), abs=1e-6)
