"""Kineto's traces: a real one of vLLM over two stages, one as GPUs make it, and files that are none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gapless.conf.errors import ConfigError
from gapless.runtime.ledger.causes import Cause
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.traces.chrome_trace import ChromeTrace
from gapless.runtime.traces.kineto import read_kineto
from gapless.runtime.traces.pipeline_run import run_of_traces

VLLM = Path(__file__).parent / "vllm_pp2"
Events = list[dict[str, Any]]


def raw(rank: int) -> Events:
    return json.loads(gzip.decompress((VLLM / f"rank{rank}.pt.trace.json.gz").read_bytes()))["traceEvents"]


def seconds_of(events: Events, name: str) -> list[tuple[float, float]]:
    found = [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e.get("ph") == "X" and name in e["name"]]
    return sorted(found)


def test_a_real_trace_of_vllm() -> None:
    """Its numbers are those that a reader adds up by hand from the events."""
    first, second = read_kineto([VLLM])
    assert [(t.rank, t.stage, t.engine) for t in (first, second)] == [(0, 0, "vLLM"), (1, 1, "vLLM")]
    run = run_of_traces([first, second])
    record, ledger = run.record, Ledger(run.record)
    ledger.check()
    sends, receives = seconds_of(raw(0), "shm_send"), seconds_of(raw(1), "shm_recv")
    assert len(first.sends) == len(sends)
    assert len(second.receives) == len(receives)
    steps = [{e["name"]: e for e in raw(rank) if e["name"].startswith("execute_")} for rank in range(2)]
    common = [name for name in steps[0] if name in steps[1] and not name.startswith("execute_0_")]
    assert [m.num_tokens for m in record.micro_batches] == [int(name.split("_")[1]) for name in common]
    assert len(common) == 11
    assert ledger.busy_seconds(0) == pytest.approx(sum(steps[0][name]["dur"] for name in common) / 1e6, abs=1e-4)
    for name, pair in zip(common, run.transfers[1], strict=True):
        computed, awaited = (steps[0][name]["ts"] + steps[0][name]["dur"]) / 1e6, steps[1][name]["ts"] / 1e6
        sent, received = min(s for s in sends if s[0] >= computed), max(r for r in receives if r[1] <= awaited)
        assert pair.wait == pytest.approx(max(0.0, sent[0] - received[0]), abs=2e-6)
        assert pair.wait + pair.transfer == pytest.approx(received[1] - received[0], abs=2e-6)
    assert all(0.0 < pair.transfer < 0.001 for pair in run.transfers[1])  # through shared memory
    assert record.unknown == ["requests", "kv", "queue"]
    assert record.depth == 2
    named = ledger.seconds_by_cause()
    assert named[Cause.UNKNOWN] < 0.05 * sum(named.values())


def gpu_event(category: str, name: str, start: float, end: float, **arguments: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": arguments,
    }


def gpu_ranks(transfer: Callable[[str, float, float], Events]) -> list[Events]:
    """Two ranks, four micro-batches of 20 and 30 ms; the second stage's receives wait for the first one's sends."""
    ranks: list[Events] = [[], []]
    free = 0.0
    for number in range(4):
        start, name = 0.025 * number, f"execute_context_1({64 + number})_generation_0(0)"
        ranks[0] += [
            gpu_event("gpu_user_annotation", name, start, start + 0.02),
            gpu_event("kernel", "gemm", start, start + 0.01),
            gpu_event("kernel", "gemm", start + 0.009, start + 0.02),
            gpu_event("user_annotation", name, start - 0.001, start + 0.002),
            gpu_event("gpu_user_annotation", name, start + 0.018, start + 0.0205),  # the same on another stream
        ]
        over = max(start + 0.02, free) + 0.001
        ranks[0] += transfer("send", start + 0.02, over)
        ranks[1] += transfer("recv", free, over)
        ranks[1] += [gpu_event("gpu_user_annotation", name, over, over + 0.03)]
        ranks[1] += [gpu_event("kernel", "gemm", over, over + 0.03)]
        free = over + 0.03
    return ranks


def by_arguments(direction: str, start: float, end: float) -> Events:
    peer = {"Dst Rank": 1} if direction == "send" else {"Src Rank": 0}
    named = {"Collective name": direction, "In msg nelems": 1024, "dtype": "BFloat16", **peer}
    return [gpu_event("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", start, end, **named)]


def by_range(direction: str, start: float, end: float) -> Events:
    text = "nccl:send 0->1" if direction == "send" else "nccl:recv 1<-0"
    return [
        gpu_event("kernel", "ncclDevKernel_SendRecv", start, end),
        gpu_event("gpu_user_annotation", text, start, end),
    ]


def by_place(direction: str, start: float, end: float) -> Events:
    return [gpu_event("kernel", "ncclDevKernel_SendRecv", start, end)]


@pytest.mark.parametrize("transfer", [by_arguments, by_range, by_place])
def test_kernels_of_nccl(transfer: Callable[[str, float, float], Events], tmp_path: Path) -> None:
    for rank, events in enumerate(gpu_ranks(transfer)):
        process = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"VLLM::Worker_PP{rank}"}}
        info = {"rank": rank, "world_size": 2, "backend": "nccl"}
        whole = {"distributedInfo": info, "traceEvents": [process, *events], "baseTimeNanoseconds": 10**18}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(whole, indent=1))
    first, second = read_kineto([tmp_path])
    assert len(first.sends) == len(second.receives) == 4
    assert not first.receives
    if transfer is by_arguments:
        assert {(t.peer, t.bytes) for t in second.receives} == {(0, 2048)}
    run = run_of_traces([first, second])
    assert [m.prefill_tokens for m in run.record.micro_batches] == [64, 65, 66, 67]
    assert [pair.transfer for pair in run.transfers[1]] == pytest.approx([0.001] * 4)
    assert run.transfers[1][0].wait == pytest.approx(0.02)
    ledger = Ledger(run.record)
    ledger.check()
    assert [ledger.busy_seconds(stage) for stage in range(2)] == pytest.approx([0.08, 0.12])


def test_middle_ranks_send_after_a_step_and_receive_before_one(tmp_path: Path) -> None:
    """Where the kernels say nothing of their direction, as those that an engine calls past torch."""
    events: Events = []
    for number in range(3):
        at = 0.1 * number
        events += by_place("recv", at, at + 0.02)
        events += [gpu_event("gpu_user_annotation", "execute_context_1(8)_generation_0(0)", at + 0.021, at + 0.05)]
        events += [gpu_event("kernel", "gemm", at + 0.021, at + 0.05)]
        events += by_place("send", at + 0.051, at + 0.06)
    for stage in range(3):
        process = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"VLLM::Worker_PP{stage}"}}
        whole = {"distributedInfo": {"rank": stage}, "traceEvents": [process, *events]}
        (tmp_path / f"rank{stage}.json").write_text(json.dumps(whole))
    _, middle, _ = read_kineto([tmp_path])
    assert len(middle.receives) == len(middle.sends) == 3
    assert middle.receives[0].end < middle.sends[0].start


def test_files_of_sglang_name_their_stage(tmp_path: Path) -> None:
    event = gpu_event("kernel", "gemm", 0.0, 1.0)
    step = gpu_event("gpu_user_annotation", "step[DECODE bs=3]", 0.0, 1.0)
    for name in ("1789-TP-0-PP-0", "1789-TP-0-PP-1"):
        (tmp_path / f"{name}.trace.json").write_text(json.dumps({"traceEvents": [event, step]}))
    assert [(t.rank, t.stage, t.engine) for t in read_kineto([tmp_path])] == [(0, 0, "SGLang"), (1, 1, "SGLang")]


def test_a_trace_is_read_event_by_event_wherever_its_pieces_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events = [{"name": "é" * n, "args": {"n": n, "deep": [[{"]": "["}]]}} for n in range(40)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"before": 1, "traceEvents": events, "after": [2]}, indent=2))
    for size in (7, 64, 1 << 20):
        monkeypatch.setattr("gapless.runtime.traces.chrome_trace._AT_ONCE", size)
        trace = ChromeTrace(path)
        assert list(trace.events()) == events
        assert trace.metadata == {"before": 1, "traceEvents": [], "after": [2]}
    path.write_text(json.dumps(events))
    assert list(ChromeTrace(path).events()) == events


def bad(text: str | bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


GOOD = json.dumps({"distributedInfo": {"rank": 0}, "traceEvents": [gpu_event("kernel", "gemm", 0.0, 1.0)]})
BACKWARD = gpu_event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 0.0, 1.0)


@pytest.mark.parametrize(
    ("write", "line"),
    [
        (bad("no trace"), "a.json: not a Chrome trace, which is JSON"),
        (bad(""), "a.json: not a Chrome trace, which is JSON"),
        (bad('{"a": 1}'), "a.json: not a Chrome trace, it has no traceEvents"),
        (bad(GOOD[:-40]), "a.json: damaged or cut off, its list of events does not end"),
        (bad(GOOD[:-1] + ","), "a.json: damaged or cut off after its events"),
        (bad(gzip.compress(GOOD.encode())[:-20]), "a.json: cannot be read as a trace, damaged or cut off"),
        (bad('{"traceEvents": [{"ph": "X", "cat": "kernel"}]}'), "a.json: damaged, or not the torch profiler's"),
        (bad('{"traceEvents": []}'), "a.json: no trace of a rank: neither kernels nor operators in it"),
        (
            bad(json.dumps({"traceEvents": [BACKWARD]})),
            "a.json: a trace of training, it has backward passes; only inference is read",
        ),
    ],
)
def test_files_that_are_no_trace(write: Callable[[Path], None], line: str, tmp_path: Path) -> None:
    write(tmp_path / "a.json")
    with pytest.raises(ConfigError) as error:
        read_kineto([tmp_path])
    assert str(error.value).startswith(f"{tmp_path}/{line}")
    assert "\n" not in str(error.value)


def test_two_recordings_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(GOOD)
    (tmp_path / "b.json").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"a\.json and b\.json are both of rank 0: keep the traces of one recording"):
        read_kineto([tmp_path])
