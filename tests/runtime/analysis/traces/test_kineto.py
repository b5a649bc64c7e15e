"""Kineto's traces: a real one of vLLM over two stages, one as GPUs make it, and files that are none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gapless.conf.errors import ConfigError
from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.traces.chrome_trace import ChromeTrace
from gapless.runtime.analysis.traces.kineto import read_kineto
from gapless.runtime.analysis.traces.nccl import kind_of
from gapless.runtime.analysis.traces.pipeline_run import run_of_traces

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


def by_rccl(direction: str, start: float, end: float) -> Events:
    """As on AMD, where the kernel's name tells sends from nothing else; its arguments do."""
    (event,) = by_arguments(direction, start, end)
    return [event | {"name": "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"}]


def by_rccl_range(direction: str, start: float, end: float) -> Events:
    kernel, around = by_range(direction, start, end)
    return [kernel | {"name": "ncclDevKernel_Generic_4"}, around]


@pytest.mark.parametrize("transfer", [by_arguments, by_range, by_place, by_rccl, by_rccl_range])
def test_kernels_of_nccl(transfer: Callable[[str, float, float], Events], tmp_path: Path) -> None:
    for rank, events in enumerate(gpu_ranks(transfer)):
        process = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"VLLM::Worker_PP{rank}"}}
        info = {"rank": rank, "world_size": 2, "backend": "nccl"}
        whole = {"distributedInfo": info, "traceEvents": [process, *events], "baseTimeNanoseconds": 10**18}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(whole, indent=1))
    first, second = read_kineto([tmp_path])
    assert len(first.sends) == len(second.receives) == 4
    assert not first.receives
    if transfer in (by_arguments, by_rccl):
        assert {(t.peer, t.bytes) for t in second.receives} == {(0, 2048)}
    run = run_of_traces([first, second])
    assert [m.prefill_tokens for m in run.record.micro_batches] == [64, 65, 66, 67]
    assert [pair.transfer for pair in run.transfers[1]] == pytest.approx([0.001] * 4)
    assert run.transfers[1][0].wait == pytest.approx(0.02)
    ledger = Ledger(run.record)
    ledger.check()
    assert [ledger.busy_seconds(stage) for stage in range(2)] == pytest.approx([0.08, 0.12])


SENDS = ("send", "recv")
COLLECTIVES = ("allreduce", "_allgather_base", "all_to_allv", "broadcast")


@pytest.mark.parametrize("kernel", ["ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "ncclDevKernel_Generic_1"])
@pytest.mark.parametrize("collective", [*SENDS, *COLLECTIVES])
def test_the_collective_s_name_says_more_than_the_kernel_s(kernel: str, collective: str) -> None:
    assert kind_of(kernel, {"Collective name": collective}) == ("transfer" if collective in SENDS else "compute")


def write_ranks(folder: Path, ranks: list[Events], *, info: bool = True, **more: Any) -> None:
    for rank, events in enumerate(ranks):
        whole = {"traceEvents": events, **({"distributedInfo": {"rank": rank}} if info else {}), **more}
        (folder / f"1763-TP-0-PP-{rank}.trace.json").write_text(json.dumps(whole))


def notes_of(folder: Path) -> str:
    """Return the notes of the run in a folder, after a look at its times: those of `gpu_ranks`."""
    run = run_of_traces(read_kineto([folder]))
    ledger = Ledger(run.record)
    assert [ledger.busy_seconds(stage) for stage in range(2)] == pytest.approx([0.08, 0.12])
    assert len(run.transfers[1]) == 4
    return " ".join(run.record.notes)


def test_files_that_are_no_rank_s_are_left_out_of_a_folder(tmp_path: Path) -> None:
    write_ranks(tmp_path, gpu_ranks(by_arguments))
    (tmp_path / "server_args.json").write_text('{"model_path": "Qwen/Qwen3-8B", "pp_size": 2}')
    (tmp_path / "list.JSON").write_text('["a", 1]')
    assert "Left out (not a rank's trace): list.JSON, server_args.json." in notes_of(tmp_path)
    with pytest.raises(ConfigError, match=r"server_args\.json: not a Chrome trace: it has no traceEvents"):
        read_kineto([tmp_path / "server_args.json", *tmp_path.glob("1763*")])


@pytest.mark.parametrize("info", [True, False])
@pytest.mark.parametrize("renamed", [True, False])
def test_a_merged_file_is_never_counted_again(renamed: bool, info: bool, tmp_path: Path) -> None:
    """Beside its ranks it is left out; alone it is refused where its processes' names say that it is one."""
    ranks = gpu_ranks(by_arguments)
    write_ranks(tmp_path, ranks, info=info)
    merged = [
        event | {"pid": f"[TP00-PP0{rank}] 0" if renamed else 0}
        for rank, events in enumerate(ranks)
        for event in events
    ]
    whole = {"traceEvents": merged} | ({"distributedInfo": {"rank": 0}} if info else {})
    (tmp_path / "all.json").write_text(json.dumps(whole))
    assert "Left out (events of several ranks): all.json." in notes_of(tmp_path)
    if renamed:
        with pytest.raises(ConfigError, match=r"all\.json: contains events of several ranks; give one file"):
            read_kineto([tmp_path / "all.json"])


@pytest.mark.parametrize("info", [True, False])
def test_phases_of_a_rank_are_joined(info: bool, tmp_path: Path) -> None:
    """SGLang's `profile_by_stage` writes a file of prompts and one of decodes for each rank."""
    write_ranks(tmp_path, gpu_ranks(by_arguments), info=info)
    for path in list(tmp_path.iterdir()):
        whole = json.loads(path.read_text())
        middle = len(whole["traceEvents"]) // 2  # between two micro-batches
        for phase, part in (("EXTEND", slice(middle)), ("DECODE", slice(middle, None))):
            events = {"traceEvents": whole["traceEvents"][part]}
            (tmp_path / path.name.replace(".trace", f"-{phase}.trace")).write_text(json.dumps(whole | events))
        path.unlink()
    assert len(list(tmp_path.iterdir())) == 4
    notes_of(tmp_path)


@pytest.mark.parametrize("again", ["-1", "-DECODE"])
@pytest.mark.parametrize("info", [True, False])
def test_two_recordings_of_a_rank_are_refused(info: bool, again: str, tmp_path: Path) -> None:
    write_ranks(tmp_path, gpu_ranks(by_arguments), info=info)
    for path in list(tmp_path.iterdir()):
        (tmp_path / path.name.replace(".trace", f"{again}.trace")).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match=r"are both traces of .*0; keep those of one recording"):
        read_kineto([tmp_path])


@pytest.mark.parametrize("groups", ["arguments", "config", "none"])
def test_peers_within_a_group_are_ranks_of_the_job(groups: str, tmp_path: Path) -> None:
    """Two tensor-parallel ranks a stage; both pipelines' groups, [0, 2] and [1, 3], say 0->1."""
    members = [[0, 2], [1, 3]]
    for rank in range(4):
        stage, pair = rank // 2, members[rank % 2]
        events = gpu_ranks(by_range)[stage]
        for event in events:
            if groups == "arguments" and event["name"] == "ncclDevKernel_SendRecv":
                event["args"] = {"Process Group Name": "5", "Process Group Ranks": str(pair)}
        config = [("0", [0, 1, 2, 3]), ("3", [rank // 2 * 2, rank // 2 * 2 + 1]), ("5", pair)]
        info: dict[str, Any] = {"rank": rank}
        if groups == "config":
            info["pg_config"] = [{"pg_name": name, "ranks": ranks} for name, ranks in config]
        whole = {"traceEvents": events, "distributedInfo": info}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(whole))
    if groups == "none":
        with pytest.raises(ConfigError, match=r"rank\d\.json: the stage of rank \d is unknown"):
            run_of_traces(read_kineto([tmp_path]))
    else:
        assert "One rank represents each stage: 0, 2." in notes_of(tmp_path)


def test_time_whose_kind_is_not_known_is_said(tmp_path: Path) -> None:
    """Kernels of RCCL that nothing names, and a transfer of which nothing says in which direction it went."""
    ranks = gpu_ranks(by_arguments)
    ranks[0].append(gpu_event("kernel", "ncclDevKernel_Generic_2(x)", 0.005, 0.009))
    ranks[0].append(gpu_event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 0.03, 0.04))
    ranks[0].append(gpu_event("kernel", "ncclDevKernel_SendRecv", 0.001, 0.003))
    for rank, events in enumerate(ranks):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": events}))
    notes = notes_of(tmp_path)
    assert "rank0.json: 0.004 s of ncclDevKernel_Generic_2 (send, receive or all-reduce) count as compute" in notes
    assert "rank0.json: 0.002 s of transfers are left out: the trace does not record the operation." in notes
    assert "AllReduce" not in notes


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-nan", "NaN", "-Infinity", "-nan(ind)", "[nan, inf]"])
def test_numbers_that_are_none_and_raw_control_characters(value: str, tmp_path: Path) -> None:
    write_ranks(tmp_path, gpu_ranks(by_arguments), deviceProperties=[{"occupancy": "VALUE"}])
    for path in tmp_path.iterdir():
        text = path.read_text().replace('"VALUE"', value)
        path.write_text(text.replace('"In msg nelems"', f'"a\tb: nan": {value}, "In msg nelems"'))
    notes_of(tmp_path)


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
        monkeypatch.setattr("gapless.runtime.analysis.traces.chrome_trace._AT_ONCE", size)
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
        (bad("no trace"), "a.json: not a Chrome trace: it is not JSON"),
        (bad(""), "a.json: not a Chrome trace: it is not JSON"),
        (bad('{"a": 1}'), "a.json: not a Chrome trace: it has no traceEvents"),
        (bad(GOOD[:-40]), "a.json: damaged or truncated: its list of events does not end"),
        (bad(GOOD[:-1] + ","), "a.json: damaged or truncated after its events"),
        (bad(gzip.compress(GOOD.encode())[:-20]), "a.json: unreadable trace, damaged or truncated"),
        (bad('{"traceEvents": [{"ph": "X", "cat": "kernel"}]}'), "a.json: damaged, or not a torch profiler trace"),
        (bad('{"traceEvents": []}'), "a.json: not a rank's trace: it has neither kernels nor operators"),
        (
            bad(json.dumps({"traceEvents": [BACKWARD]})),
            "a.json: a training trace (it has backward passes); only inference is supported",
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
    with pytest.raises(ConfigError, match=r"a\.json and b\.json are both traces of rank 0; keep those of one"):
        read_kineto([tmp_path])
