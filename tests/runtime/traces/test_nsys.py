"""Nsight Systems exports: ranks, steps, sends and receives as they were, whatever version wrote the file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from gapless.conf.errors import ConfigError
from gapless.runtime.ledger.causes import Cause
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.traces.nsys import read_nsys
from gapless.runtime.traces.pipeline_run import run_of_traces
from gapless.runtime.traces.rank_trace import RankTrace
from gapless.runtime.traces.read import READERS
from tests.support.nsys_files import MicroBatch, RankEvents, pipeline_events, write_export

RUN = [
    MicroBatch(512, 0, (4000, 4200)), MicroBatch(512, 2, (4100, 4300)), MicroBatch(130, 4, (2000, 2100)),
    MicroBatch(0, 6, (900, 1100)), MicroBatch(0, 6, (900, 1150)), MicroBatch(0, 5, (800, 1000)),
]  # fmt: skip


@pytest.fixture(scope="module")
def run() -> tuple[list[RankEvents], list[list[tuple[int, int]]]]:
    return pipeline_events(RUN, back=True)


def files(folder: Path, ranks: list[RankEvents], **keywords: object) -> Path:
    for events in ranks:
        write_export(folder / f"report_rank{events.rank}.sqlite", [events], started=0, **keywords)  # type: ignore[arg-type]
    return folder


def check(traces: list[RankTrace], ranks: list[RankEvents], spans: list[list[tuple[int, int]]]) -> None:
    assert [trace.rank for trace in traces] == [0, 1]
    for trace, own in zip(traces, spans, strict=True):
        assert trace.engine == "vLLM"
        assert [(round(s.start * 1e9), round(s.end * 1e9)) for s in trace.steps] == own
        assert [(s.prefill_tokens, s.decode_tokens) for s in trace.steps] == [(b.prefill, b.decodes) for b in RUN]
        launches = ranks[trace.rank].launches
        nccl = [launch for launch in launches if "nccl" in launch.name]
        seen = sorted((round(t.start * 1e9), round(t.end * 1e9)) for t in [*trace.sends, *trace.receives])
        assert seen == sorted((launch.start, launch.end) for launch in nccl)
        computed = sum(launch.end - launch.start for launch in launches if "nccl" not in launch.name)
        assert round(float(np.diff(trace.computes).sum()) * 1e9) == computed
    sent, got = traces[0].sends, traces[1].receives
    assert [send.peer for send in sent] == [1] * len(RUN)
    assert [receive.peer for receive in got] == [0] * len(RUN)
    assert [send.bytes for send in sent] == [(b.prefill + b.decodes) * 1024 for b in RUN] == [r.bytes for r in got]
    assert {transfer.group for transfer in [*sent, *got]} == {"abcdef0123456789"}
    assert len(traces[1].sends) == len(RUN)
    assert {send.peer for send in traces[1].sends} == {0}


def test_a_file_for_each_rank(tmp_path: Path, run: tuple[list[RankEvents], list[list[tuple[int, int]]]]) -> None:
    traces = read_nsys([files(tmp_path, run[0])])
    check(traces, *run)
    assert traces[0].host != traces[1].host  # each session has a clock of its own


def test_all_ranks_in_one_file(tmp_path: Path, run: tuple[list[RankEvents], list[list[tuple[int, int]]]]) -> None:
    write_export(tmp_path / "all.sqlite", list(reversed(run[0])), started=0)
    traces = read_nsys([tmp_path / "all.sqlite"])
    check(traces, *run)
    assert traces[0].host == traces[1].host


@pytest.mark.parametrize(
    "without",
    [
        ["CUPTI_ACTIVITY_KIND_KERNEL.globalPid", "CUPTI_ACTIVITY_KIND_KERNEL.greenContextId"],
        ["TARGET_INFO_SESSION_START_TIME.utcEpochNs", "TARGET_INFO_SYSTEM_ENV.value"],
    ],
)
def test_columns_that_a_version_does_not_write(
    tmp_path: Path, run: tuple[list[RankEvents], list[list[tuple[int, int]]]], without: list[str]
) -> None:
    traces = read_nsys([files(tmp_path, run[0], without=without)])
    assert [len(trace.steps) for trace in traces] == [len(RUN)] * 2
    assert [len(trace.sends) for trace in traces] == [len(RUN)] * 2


def test_sessions_that_began_apart(tmp_path: Path, run: tuple[list[RankEvents], list[list[tuple[int, int]]]]) -> None:
    for events, started in zip(run[0], (0, 700_000), strict=True):
        write_export(tmp_path / f"rank{events.rank}.sqlite", [events], started=started)
    check(read_nsys([tmp_path]), *run)


def test_the_run_of_an_export(tmp_path: Path, run: tuple[list[RankEvents], list[list[tuple[int, int]]]]) -> None:
    """Spans are the pipeline's to the nanosecond, and the ledger tells messages from waits for the other stage."""
    write_export(tmp_path / "all.sqlite", run[0], started=0)
    record = run_of_traces(read_nsys([tmp_path])).record
    assert [(m.prefill_tokens, m.decode_tokens) for m in record.micro_batches] == [(b.prefill, b.decodes) for b in RUN]
    for stage, own in enumerate(run[1]):
        spans = [(round(s.begin * 1e9), round(s.end * 1e9)) for s in record.spans if s.stage == stage]
        assert spans == own
    ledger = Ledger(record)
    ledger.check()
    transport = 40e-6 * (len(RUN) - 1)  # of every message but the first, whose receive ends the fill
    assert ledger.seconds_by_cause(1)[Cause.TRANSPORT] == pytest.approx(transport, abs=1e-8)
    waited = ledger.seconds_by_cause(0)
    assert waited[Cause.PB1_PREFILL_SIZE] > 2e-3 > 40e-6 * len(RUN) >= waited[Cause.TRANSPORT]
    assert any("Both ranks read one clock" in note for note in record.notes)


@pytest.mark.parametrize("ahead", [3_000_000, -1_204_000])
def test_clocks_apart_are_brought_together(
    tmp_path: Path, run: tuple[list[RankEvents], list[list[tuple[int, int]]]], ahead: int
) -> None:
    """Rank 1's host is `ahead` nanoseconds ahead. Each message takes 40 us one way and tokens come back in 40."""
    write_export(tmp_path / "rank0.sqlite", [run[0][0]], started=0, host="a")
    write_export(tmp_path / "rank1.sqlite", [run[0][1]], started=0, host="b", ahead=ahead)
    record = run_of_traces(read_nsys([tmp_path])).record
    line = next(note for note in record.notes if "Clocks of rank 1" in note)
    assert f"lie {abs(ahead) / 1e6:.3f} ms ± " in line
    assert f"{'ahead of' if ahead > 0 else 'behind'} rank 0's, from 10 messages both ways." in line
    first = record.spans[0].begin * 1e9 - run[1][0][0][0]
    for stage, own in enumerate(run[1]):
        spans = [(s.begin * 1e9 - first, s.end * 1e9 - first) for s in record.spans if s.stage == stage]
        assert np.array(spans) == pytest.approx(np.array(own), abs=50_000)
    Ledger(record).check()


def test_a_log_beside_the_exports_names_what_steps_held(tmp_path: Path) -> None:
    """Ranges that say no tokens (VLLM_NVTX_SCOPES_FOR_PROFILING=1) and the iteration log of the same run."""
    tokens = [(512, 0), (300, 1), (0, 2), (0, 2), (256, 2), (0, 3), (90, 3), (0, 4)] * 2
    batches = [
        MicroBatch(prefill, decodes, (900 + 8 * prefill + 37 * i, 1000 + 8 * prefill + 41 * i))
        for i, (prefill, decodes) in enumerate(tokens)
    ]
    ranks, spans = pipeline_events(batches)
    lines = []
    for number, (before, after) in enumerate(zip([(0, spans[1][0][0]), *spans[1]], spans[1], strict=False)):
        batch, elapsed = batches[number], (after[1] - before[1]) / 1e6
        lines.append(
            f"INFO 11-24 10:00:{after[1] // 10**9:02d} [loggers.py:199] Engine 000: Iteration({number}): "
            f"{int(batch.prefill > 0)} context requests, {batch.prefill} context tokens, {batch.decodes} generation "
            f"requests, {batch.decodes} generation tokens, iteration elapsed time: {elapsed:.2f} ms"
        )
    (tmp_path / "serve.log").write_text("\n".join([*lines[:1], *lines]))
    for events in ranks:
        for each in events.ranges:
            each.text = "gpu_model_runner: forward" if each.text.startswith("execute") else each.text
        write_export(tmp_path / f"rank{events.rank}.sqlite", [events], started=0)
    record = READERS["nsys"]([tmp_path]).record
    held = [(m.prefill_tokens, m.decode_tokens) for m in record.micro_batches]
    assert held == [(b.prefill, b.decodes) for b in batches]
    assert "tokens" not in record.unknown
    assert any("its iterations 0 to 15" in note for note in record.notes)
    assert Ledger(record).seconds_by_cause(0)[Cause.PB2_PREFILL_DECODE] > 0
    (tmp_path / "serve.log").unlink()
    record = READERS["nsys"]([tmp_path]).record
    assert "tokens" in record.unknown
    assert Ledger(record).seconds_by_cause()[Cause.UNKNOWN] > 0


def test_without_payloads_peers_are_unknown_and_calls_still_match_kernels(
    tmp_path: Path, run: tuple[list[RankEvents], list[list[tuple[int, int]]]]
) -> None:
    traces = read_nsys([files(tmp_path, run[0], without=["NVTX_EVENTS.binaryData"])])
    assert [len(trace.sends) for trace in traces] == [len(RUN)] * 2
    assert {transfer.peer for trace in traces for transfer in [*trace.sends, *trace.receives]} == {None}


def test_without_nvtx_a_note_says_what_to_record(
    tmp_path: Path, run: tuple[list[RankEvents], list[list[tuple[int, int]]]]
) -> None:
    for events in run[0]:
        write_export(tmp_path / f"{events.rank}.sqlite", [RankEvents(events.rank, events.launches)], started=0)
    trace = read_nsys([tmp_path])[0]
    assert not trace.steps
    assert "--trace cuda,nvtx" in trace.notes[0]


def test_what_is_no_export_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(*words: str) -> None:
        with pytest.raises(ConfigError) as error:
            read_nsys([tmp_path])
        assert all(word in str(error.value) for word in words), str(error.value)
        assert "\n" not in str(error.value)

    refused("holds no export of Nsight Systems")
    (tmp_path / "run.nsys-rep").write_bytes(b"report")
    command = "nsys export --type sqlite --output run.sqlite run.nsys-rep"
    refused("run.nsys-rep", command)
    with pytest.raises(ConfigError, match=command):
        read_nsys([tmp_path / "run.nsys-rep"])
    with pytest.raises(ConfigError, match="no such file or folder"):
        read_nsys([tmp_path / "none"])
    export = tmp_path / "run.sqlite"
    export.write_bytes(b"text, not a database")
    refused("not an SQLite file", "nsys export")
    export.unlink()
    with sqlite3.connect(export) as connection:
        connection.execute("CREATE TABLE other (id INTEGER)")
    refused("not exported by Nsight Systems", "StringIds")
    with sqlite3.connect(export) as connection:
        connection.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    refused("no kernel", "--trace cuda,nvtx")
    data = export.read_bytes()
    export.write_bytes(data[:60] + b"\xff" * 400 + data[460:])
    refused("damaged")
