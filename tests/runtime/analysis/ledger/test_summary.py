"""The run's key numbers: vLLM's names, values by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gapless.conf.workloads import SloConfig
from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.core.latencies import latencies
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, RunRecord
from tests.support.hand_made import one_stage

VLLM = ["duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"]
VLLM += ["output_throughput", "total_token_throughput"]
VLLM += [f"{s}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "median", "std", "p99")]
OURS = ["bubble_fraction", "bubble_fraction_inner", "bubble_seconds", "median_bubble_ms_per_request"]
OURS += ["stage_busy_fraction", "micro_batches", "mean_tokens_per_micro_batch", "cv_stage_time"]
OURS += ["batch", "depth", "peak_kv_fraction", "preemptions"]
OURS += ["draft_tokens", "accepted_tokens", "accepted_tokens_per_decode"]


@pytest.fixture
def record() -> RunRecord:
    return one_stage()


def test_values(record: RunRecord):
    summary = summarize(Fleet([record]))
    assert set(VLLM + OURS) <= set(summary)
    expected = {
        "duration": 6.5,  # the last token came half a second after the last compute
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 12,
        "total_output_tokens": 5,
        "request_throughput": 2 / 6.5,
        "output_throughput": 5 / 6.5,
        "total_token_throughput": 17 / 6.5,
        "mean_ttft_ms": 2250.0,  # 1 s and 3.5 s
        "median_ttft_ms": 2250.0,
        "std_ttft_ms": 1250.0,
        "p99_ttft_ms": 3475.0,
        "mean_tpot_ms": 2500.0,  # both 2.5 s
        "std_tpot_ms": 0.0,
        "median_itl_ms": 2500.0,  # 3, 2 and 2.5 s
        "mean_e2el_ms": 6000.0,  # both 6 s
        "bubble_fraction": 2 / 6,
        "bubble_fraction_inner": 0.5 / 6,
        "starved_seconds": 1.5,
        "median_bubble_ms_per_request": 2000.0,  # both ride in the two micro-batches that were waited for
        "micro_batches": 3,
        "mean_tokens_per_micro_batch": 5.0,
        "cv_stage_time": np.std([1, 2, 1]) / np.mean([1, 2, 1]),
        "peak_kv_fraction": 0.5,
        "preemptions": 1,
    }
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert summary["stage_busy_fraction"] == pytest.approx([4 / 6])
    seconds = {"starved_kv_full": 1.0, "starved_in_flight": 0.5, "control": 0.5}
    assert summary["bubble_seconds"] == pytest.approx({str(c): seconds.get(str(c), 0.0) for c in Cause})


def test_prediction_error(record: RunRecord):
    assert summarize(Fleet([record]))["prediction_error"] is None
    record.micro_batches[0].predicted, record.micro_batches[1].predicted = [1.1], [1.0]  # of 1 s and 2 s
    error = summarize(Fleet([record]))["prediction_error"]
    assert error == pytest.approx({"median": 0.3, "p90": 0.1 + 0.9 * 0.4})


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (SloConfig(ttft_ms=1000), 1),
        (SloConfig(ttft_ms=3500), 2),
        (SloConfig(tbt_ms=2600), 1),
        (SloConfig(tpot_ms=2499), 0),
        (SloConfig(e2el_ms=6000, ttft_ms=2000), 1),
    ],
)
def test_goodput(record: RunRecord, slo: SloConfig, good: int):
    assert summarize(Fleet([record]), slo)["request_goodput"] == pytest.approx(good / 6.5)
    assert "request_goodput" not in summarize(Fleet([record]), SloConfig())


def test_it_is_json(record: RunRecord):
    summary = summarize(Fleet([record]))
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_an_empty_run():
    record = RunRecord(2, 0)
    summary = summarize(Fleet([record]))
    assert json.dumps(summary, allow_nan=False)
    assert (summary["completed"], summary["p99_ttft_ms"], summary["stage_busy_fraction"]) == (0, 0.0, [0.0, 0.0])


@pytest.mark.parametrize("reason", [None, "abort", "error"])
def test_requests_that_did_not_end_by_themselves_have_failed(record: RunRecord, reason: str | None):
    record.requests[0].finish_reason = reason
    summary = summarize(Fleet([record]))
    assert (summary["completed"], summary["failed"], summary["median_ttft_ms"]) == (1, 2, 3500.0)


def test_drafts_and_preemptions_are_counted(record: RunRecord):
    record.requests[2].preemptions = 4  # of a request that failed
    last = record.micro_batches[2]
    last.decodes = DecodesRecord.at([0, 0, 0, 1], [9, 10, 11, 4])  # request 0 with two drafts
    last.drafts, last.accepted = 2, 1
    summary = summarize(Fleet([record]))
    assert (summary["preemptions"], summary["draft_tokens"], summary["accepted_tokens"]) == (5, 2, 1)
    assert summary["accepted_tokens_per_decode"] == pytest.approx(1 / 3)


def test_one_token_has_no_time_per_output_token():
    values = latencies([RequestRecord(0, 8, 1.0, [3.0])])
    assert values["ttft"].tolist() == values["e2el"].tolist() == [2000.0]
    assert len(values["tpot"]) == len(values["itl"]) == 0


def test_the_time_per_output_token_is_a_mean():
    values = latencies([RequestRecord(0, 8, 1.0, [3.0, 4.0, 5.0, 9.0])])
    assert values["itl"].tolist() == [1000.0, 1000.0, 4000.0]
    assert values["tpot"].tolist() == [2000.0]
