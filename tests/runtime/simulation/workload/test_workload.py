"""Workloads have the counts, bounds and rates of their config and are deterministic; bad files are refused."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.errors import ConfigError
from gapless.conf.workloads import FixedConfig, ShareGptConfig, TraceConfig, WorkloadConfig, ZipfConfig
from gapless.models.tokenizer import ByteTokenizer
from gapless.runtime.simulation.workload import Workload, make_workload
from tests.support.tiers import examples

AZURE = Path(os.environ.get("GAPLESS_AZURE_TRACE", ""))  # AzureLLMInferenceTrace_conv.csv of 2023, .gz or not
VOCAB = 300


def make(config: WorkloadConfig, context: int = 1 << 30) -> Workload:
    return make_workload(config, vocab_size=VOCAB, context=context, tokenizer=ByteTokenizer(VOCAB))


def error(config: WorkloadConfig, context: int = 1 << 30) -> str:
    with pytest.raises(ConfigError) as caught:
        make(config, context)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def trace(
    folder: Path, *rows: str, header: str = "TIMESTAMP,ContextTokens,GeneratedTokens", **keys: object
) -> TraceConfig:
    path = folder / "trace.csv"
    path.write_text("\n".join([header, *rows]), encoding="utf-8")
    return TraceConfig(path=str(path), **keys)  # type: ignore[arg-type]


def triples(workload: Workload) -> list[tuple[float, int, int]]:
    return [(round(item.arrival, 6), len(item.prompt), item.output_len) for item in workload]


RATES = st.none() | st.just(math.inf) | st.floats(0.1, 1000)
CONFIGS = st.one_of(
    st.builds(
        FixedConfig,
        num_prompts=st.integers(1, 60),
        input_len=st.integers(1, 50),
        output_len=st.integers(1, 50),
        range_ratio=st.floats(0, 0.9),
        request_rate=RATES,
        burstiness=st.floats(0.2, 9) | st.just(math.inf),
        users=st.integers(1, 4),
        deadline_ms=st.none() | st.just(250.0),
        seed=st.integers(0, 9),
    ),
    st.builds(
        ZipfConfig,
        num_prompts=st.integers(1, 60),
        theta=st.floats(0, 3),
        min_len=st.integers(2, 20),
        max_len=st.integers(20, 90),
        pd_ratio=st.floats(0.001, 1000),
        request_rate=RATES,
    ),
)


@given(CONFIGS)
def test_every_workload_has_what_its_config_asks_for(config: FixedConfig | ZipfConfig) -> None:
    workload = make(config)
    items = list(workload)
    assert len(workload) == len(items) == config.num_prompts
    assert list(make(config)) == items, "the same config gives the same requests"
    arrivals = [item.arrival for item in items]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    for number, item in enumerate(items):
        assert 0 <= min(item.prompt) <= max(item.prompt) < VOCAB
        assert item.user == ("" if config.users == 1 else f"user-{number % config.users}")
        assert item.deadline == (None if config.deadline_ms is None else 0.25)
        p, d = len(item.prompt), item.output_len
        if isinstance(config, ZipfConfig):
            assert config.min_len <= p + d <= config.max_len
            assert d == min(max(1, round((p + d) / (1 + config.pd_ratio))), p + d - 1)
        else:
            r = config.range_ratio
            for length, typical in ((p, config.input_len), (d, config.output_len)):
                assert typical is not None
                assert max(1, math.floor(typical * (1 - r))) <= length <= math.ceil(typical * (1 + r))


def test_a_workload_is_a_sequence() -> None:
    workload = make(FixedConfig(num_prompts=5, input_len=3, output_len=2, seed=4))
    assert workload[1:3] == [workload[1], workload[2]]
    assert workload[-1] == workload[4]
    assert workload[0].prompt != workload[1].prompt
    assert workload[0] != make(FixedConfig(num_prompts=5, input_len=3, output_len=2, seed=5))[0]
    with pytest.raises(IndexError):
        workload[5]


@pytest.mark.parametrize(
    ("input_len", "output_len", "ratio", "lengths"),
    [
        (1024, 128, None, (1024, 128)),
        (1024, None, 10.0, (1024, 102)),
        (None, 100, 0.5, (50, 100)),
        (3, None, 50.0, (3, 1)),
        (None, 1, 0.1, (1, 1)),
    ],
)
def test_pd_ratio_gives_the_length_that_is_null(
    input_len: int | None, output_len: int | None, ratio: float | None, lengths: tuple[int, int]
) -> None:
    workload = make(FixedConfig(num_prompts=2, input_len=input_len, output_len=output_len, pd_ratio=ratio))
    assert {(p, d) for _, p, d in triples(workload)} == {lengths}


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0, math.inf])
def test_arrivals_have_the_rate_and_the_burstiness(shape: float) -> None:
    rate, num = 20.0, 40_000
    gaps = np.diff(make(FixedConfig(num_prompts=num, request_rate=rate, burstiness=shape)).arrivals)
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / shape, rel=0.1, abs=1e-9)


def test_a_new_rate_leaves_the_requests_as_they_were() -> None:
    slow, fast = (make(ZipfConfig(num_prompts=50, request_rate=rate)) for rate in (1.0, 2.0))
    assert [item.prompt for item in slow] == [item.prompt for item in fast]
    assert np.allclose(slow.arrivals, 2 * fast.arrivals)


@pytest.mark.parametrize("theta", [0.0, 0.4, 2.0])
def test_totals_follow_the_zipf_law(theta: float) -> None:
    config = ZipfConfig(num_prompts=200_000, theta=theta, min_len=10, max_len=59)
    workload = make(config)
    totals = workload.input_lens + workload.output_lens
    expected = np.arange(1, 51.0) ** -theta
    found = np.bincount(totals - 10, minlength=50) / len(totals)
    assert np.abs(found - expected / expected.sum()).max() < 0.005


AZURE_2023 = ("2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:47.9305901,396,109")
AZURE_2024 = ("2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 02:00:00.509930+02:00,2399,6")
BURST = ("5,ChatGPT,472,18,490,Conversation log", "45.5,GPT-4,1087,230,1317,API log")
BURST_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


@pytest.mark.parametrize(
    ("header", "rows", "expected"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens", AZURE_2023, [(0.0, 374, 44), (1.25, 396, 109)]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", AZURE_2024, [(0.0, 2162, 5), (0.5, 2399, 6)]),
        (BURST_HEADER, BURST, [(0.0, 472, 18), (40.5, 1087, 230)]),
        ("arrived_at,num_prefill_tokens,num_decode_tokens", ("0.5,10,3", "2,11,4"), [(0.0, 10, 3), (1.5, 11, 4)]),
        ("timestamp,input_length,output_length", ("0,10,3", "27,11,4"), [(0.0, 10, 3), (0.027, 11, 4)]),
    ],
)
@pytest.mark.parametrize("disguise", ["plain", "crlf", "bom", "gz", "gz by another name"])
def test_each_csv_of_a_trace(
    header: str, rows: Sequence[str], expected: list[tuple[float, int, int]], disguise: str, tmp_path: Path
) -> None:
    text = "\r\n".join([header, *rows, ""]) if disguise == "crlf" else "\n".join([header, *rows])
    path = tmp_path / ("t.csv.gz" if disguise == "gz" else "t.csv")
    raw = text.encode("utf-8-sig" if disguise == "bom" else "utf-8")
    path.write_bytes(gzip.compress(raw) if disguise.startswith("gz") else raw)
    assert triples(make(TraceConfig(path=str(path)))) == expected


MOONCAKE = (
    f'{{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": {list(range(46, 60))}}}',
    '{"timestamp": 30535, "input_length": 6472, "output_length": 26, '
    f'"hash_ids": {[*range(46, 51), *range(70, 78)]}}}',
)
BAILIAN = (
    '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521, "output_length": 132, '
    f'"type": "text", "turn": 1, "hash_ids": {list(range(1089, 1122))}}}',
    '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 62, "input_length": 8, "output_length": 3}',
)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (MOONCAKE, [(0.0, 6955, 52), (3.053, 6472, 26)]),
        (BAILIAN, [(0.0, 521, 132), (pytest.approx(0.886), 8, 3)]),
    ],
)
@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_each_jsonl_of_a_trace(rows: Sequence[str], expected: Any, name: str, tmp_path: Path) -> None:
    raw = "\n\n".join(rows).encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    assert triples(make(TraceConfig(path=str(tmp_path / name)))) == expected


ROW = {"timestamp": 0, "input_length": 12, "output_length": 4}
LATER = {"timestamp": 3000, "input_length": 700, "output_length": 5}
BOTH = [(0.0, 12, 4), (3.0, 700, 5)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps([ROW, LATER]), BOTH),
        (json.dumps([ROW, LATER], indent=1), BOTH),
        ("\n".join(json.dumps(row, indent=1) for row in (ROW, LATER)), BOTH),
        ("\n \r\n" + "\r\n".join(map(json.dumps, (ROW, LATER))), BOTH),
        (json.dumps(ROW | {"input_length": 12.0, "output_length": "4.0"}) + "\n" + json.dumps(LATER), BOTH),
        (json.dumps(ROW | {"meta": {"input_length": 9}, "note": '"timestamp": 3'}), [(0.0, 12, 4)]),
        (json.dumps([ROW | {"hash_ids": []}, LATER]), BOTH),
        (json.dumps([ROW | {"hash_ids": None}, {key.upper(): value for key, value in LATER.items()}]), BOTH),
        ('{"timestamp": "2025-01-01T00:00:03Z", "input_tokens": 7e2, "output_tokens": 5}', [(0.0, 700, 5)]),
        ("\n\ntimestamp;input_length;output_length\n0;12.0;4.0\n3000;700;5", BOTH),
        ("id\tarrived_at\tprompt_tokens\tcompletion_tokens\n0\t5\t12\t4\n1\t8.0\t7e2\t5", BOTH),
        (json.dumps([ROW | {"timestamp": 1763000000}, LATER | {"timestamp": 1763000003}]), BOTH),  # seconds since 1970
        ("arrived_at,isl,osl\n1763000000000,12,4\n1763000003000,700,5", BOTH),  # milliseconds since 1970
        ("arrived_at,isl,osl\n1763000000000000000,12,4\n1763000003000000000,700,5", BOTH),  # nanoseconds
    ],
)
@pytest.mark.parametrize("name", ["t.csv", "T.JSON", "trace"])
def test_what_a_trace_is_stands_in_it_and_not_in_its_name(text: str, expected: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert triples(make(TraceConfig(path=str(tmp_path / name)))) == expected


@pytest.mark.parametrize("form", ["jsonl", "csv", "printed"])
@pytest.mark.parametrize("big", [2**63 + 77, 2**64 - 5, 2**127 + 1, -3, "a3f09c", 7.0])
def test_hash_ids_of_any_size_keep_apart(big: float | str, form: str, tmp_path: Path) -> None:
    again = int(big) if isinstance(big, float) else big
    rows = [(0, 1536, 4, [big, 5, 6]), (5, 1536, 4, [again, 5, 2**64 + 6]), (9, 512, 4, [2**63 + 78])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    with (tmp_path / "t").open("w", newline="") as file:
        if form != "jsonl":
            write = str if form == "printed" else json.dumps
            csv.writer(file).writerows([names, *((*row[:3], write(row[3])) for row in rows)])
        else:
            file.write("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    workload = make(TraceConfig(path=str(tmp_path / "t")))
    first, second, third = (item.prefix.block_hashes(len(item.prompt), 512) for item in workload.without_prompts())
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False]
    assert third[0] not in first
    prompts = [item.prompt for item in workload]
    assert prompts[0][:1024] == prompts[1][:1024]
    assert prompts[0][:512] != prompts[2]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"PAR1\x15\x04", "workload.path={}: a Parquet file; give UTF-8 text"),
        (b"PK\x03\x04", "workload.path={}: a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "workload.path={}: a Git LFS pointer"),
        ("timestamp".encode("utf-16"), "workload.path={}: text in UTF-16"),
        (json.dumps([ROW, LATER], indent=1)[:-2].encode(), "{}:7: not JSON: expected , or ]"),
        (b'[{"timestamp": 0, "input_length": 1, "output_length": 1}\n 3]', "{}:1: not JSON: expected , or ]"),
        (json.dumps(ROW | {"input_length": 12.5}).encode(), "{}:1: not a time and two token counts: '0,12.5,4'"),
        (json.dumps(ROW | {"input_length": True}).encode(), "{}:1: not a time and two token counts"),
        (json.dumps(ROW | {"output_length": None}).encode(), "{}:1: not a time and two token counts"),
        (b"timestamp,input_length,output_length\n0,12.0,\n", "{}:2: not a time and two token counts: '0,12.0,'"),
        (b"timestamp,isl,osl,isl\n0,1,1,2\n", "{}:1: duplicate column 'isl'"),
        (json.dumps(ROW | {"hash_ids": [1.5]}).encode(), "{}:1: hash_ids: must be a list of integers or strings"),
        (b'{"timestamp": NaN, "input_length": 1, "output_length": 1}', "{}:1: out of range"),
        (b'{"timestamp": 0, "timestamp": 1, "input_length": 1, "output_length": 1}', "{}:1: duplicate key 'timestamp'"),
    ],
)
def test_what_no_trace_may_hold_is_named(content: bytes, line: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    assert error(TraceConfig(path=str(tmp_path / "t.csv"))).startswith(line.format(tmp_path / "t.csv"))


def test_prompts_of_a_jsonl_begin_alike_where_its_ids_say_so(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(reversed(MOONCAKE)))  # the workload is in the order of time
    workload = make(TraceConfig(path=str(path)), context=8192)
    first, second = (item.prompt for item in workload)
    assert (len(first), len(second)) == (6955, 6472)
    assert first[: 5 * 512] == second[: 5 * 512]
    assert first[5 * 512 : 6 * 512] != second[5 * 512 : 6 * 512]
    hashes = [item.prefix.block_hashes(len(item.prompt), 24) for item in workload.without_prompts() if item.prefix]
    assert [len(each) for each in hashes] == [6955 // 24, 6472 // 24]
    shared = [a == b for a, b in zip(*hashes, strict=False)]
    assert shared == [24 * (number + 1) <= 5 * 512 for number in range(len(shared))]


def test_hash_ids_must_cover_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1, 2, 3]}')
    expected = f"{path}:1: hash_ids has 3 entries for 100 tokens, not one per 512; see workload.hash_block_size"
    assert error(TraceConfig(path=str(path))) == expected
    assert len(make(TraceConfig(path=str(path), hash_block_size=32))[0].prompt) == 100  # the last 4 tokens have no id


def test_rows_are_sorted_and_blank_lines_skipped(tmp_path: Path) -> None:
    rows = ("30,3,30", "", "10,1,10", "  ", "20,2,20", "10,4,40")
    config = trace(tmp_path, *rows, time_scale=10.0)
    assert triples(make(config)) == [(0.0, 1, 10), (0.0, 4, 40), (1.0, 2, 20), (2.0, 3, 30)]
    assert [row[1] for row in triples(make(trace(tmp_path, *rows, num_prompts=2)))] == [1, 4]
    assert error(trace(tmp_path, *rows, num_prompts=5)) == f"workload.num_prompts=5: {config.path} has 4 requests"


def test_a_rate_stands_in_for_a_trace_s_own_times(tmp_path: Path) -> None:
    rows = ("0,1,1", "500,1,1")
    assert make(trace(tmp_path, *rows, request_rate=math.inf)).arrivals.tolist() == [0.0, 0.0]
    assert make(trace(tmp_path, *rows, request_rate=2.0, burstiness=math.inf)).arrivals.tolist() == [0.0, 0.5]


def test_no_tokens_count_as_one(tmp_path: Path) -> None:
    assert triples(make(trace(tmp_path, "0,0,0", "1,5,0", "2,0,5"))) == [(0.0, 1, 1), (1.0, 5, 1), (2.0, 1, 5)]


def test_longer_requests_are_cut_to_the_context_the_prompt_first(tmp_path: Path) -> None:
    config = trace(tmp_path, "0,60,40", "1,90,11", "2,500,20", "3,500,99", "4,5,100", "5,500,500")
    workload = make(config, context=100)
    assert [row[1:] for row in triples(workload)] == [(60, 40), (89, 11), (80, 20), (1, 99), (1, 99), (1, 99)]
    assert workload.num_cut == 5


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=20), st.integers(2, 200))
@settings(max_examples=examples(30))
def test_what_is_cut_fits_and_what_fits_is_not(rows: list[tuple[int, int]], context: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = trace(Path(folder), *(f"{n},{p},{d}" for n, (p, d) in enumerate(rows)))
        workload = make(config, context)
    for (p, d), (_, cut_p, cut_d) in zip(rows, triples(workload), strict=True):
        p, d = max(p, 1), max(d, 1)
        assert min(cut_p, cut_d) >= 1
        assert cut_p + cut_d == min(p + d, context)
        assert cut_d == min(d, context - 1)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ("2023-11-16 18:15:46,x,4", ":3: not a time and two token counts: '2023-11-16 18:15:46,x,4'"),
        ("yesterday,3,4", ":3: not a time and two token counts: 'yesterday,3,4'"),
        ("2023-11-16 18:15:46,3", ":3: not a time and two token counts: '2023-11-16 18:15:46,3'"),
        ("2023-11-16 18:15:46,-3,4", ":3: out of range: '2023-11-16 18:15:46,-3,4'"),
        ("2023-11-16 18:15:46,3,99999999999999", ":3: out of range: '2023-11-16 18:15:46,3,99999999999999'"),
    ],
)
def test_a_bad_row_is_named_by_its_line(row: str, line: str, tmp_path: Path) -> None:
    config = trace(tmp_path, AZURE_2023[0], row)
    assert error(config) == config.path + line


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    def of(content: bytes) -> str:
        (tmp_path / "t.csv").write_bytes(content)
        return error(TraceConfig(path=str(tmp_path / "t.csv"))).removeprefix(f"{tmp_path}/t.csv")

    assert of(b"a,b,c\n1,2,3\n").startswith(":1: must have the columns TIMESTAMP, ContextTokens, GeneratedTokens")
    assert of(b"").endswith("it has none")
    assert of(b"TIMESTAMP,ContextTokens,GeneratedTokens\n\n") == ": has no requests"
    assert of(b'{"timestamp": 3, "input_length": 5}\n').startswith(":1: must have the columns TIMESTAMP, ContextTokens")
    good = b'{"timestamp": 3, "input_length": 5, "output_length": 1}\n'
    assert of(good + b"3,4,5").startswith(":2: not JSON: Extra data")
    assert of(good + good.replace(b"5", b"-5")).startswith(":2: out of range: '3,-5,1'")
    assert of(b"\xff\xff\x00").startswith(": not UTF-8 text")
    assert of(gzip.compress(b"TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n")[:-9]).startswith(": a damaged .gz")
    assert error(TraceConfig(path="none.csv")) == "workload.path=none.csv: no such file"
    assert error(TraceConfig(path=str(tmp_path))) == f"workload.path={tmp_path}: is a directory"


def test_a_million_requests_are_made_as_they_are_asked_for() -> None:
    workload = make(ZipfConfig(num_prompts=1_000_000, request_rate=1000.0))
    assert workload.input_lens.nbytes == workload.arrivals.nbytes == 8_000_000
    assert workload.prompts is None
    assert len(workload[999_999].prompt) == workload.input_lens[-1]


@pytest.mark.skipif(not AZURE.is_file(), reason="GAPLESS_AZURE_TRACE names no file")
def test_the_azure_conversation_trace() -> None:
    workload = make(TraceConfig(path=str(AZURE)), context=4096)
    assert len(workload) == 19366
    assert workload.arrivals[-1] == pytest.approx(3501.72, abs=0.01)
    assert (workload.input_lens + workload.output_lens).max() == 4096
    assert np.median(workload.input_lens) == pytest.approx(1020, rel=0.05)


def conversations(folder: Path, *turns: Sequence[str], **keys: object) -> ShareGptConfig:
    path = folder / "c.json"
    rows = [
        {"id": str(n), "conversations": [{"from": "human", "value": t} for t in row]} for n, row in enumerate(turns)
    ]
    path.write_text(json.dumps(rows), encoding="utf-8")
    return ShareGptConfig(path=str(path), **keys)  # type: ignore[arg-type]


def test_sharegpt_takes_the_first_two_turns(tmp_path: Path) -> None:
    rows = [
        ("Hello you", "Hi, back."),
        ("question", "its answer", "and more"),
        ("one turn",),
        ("abc", "too short"),
        ("long", "abc"),
        (),
    ]
    workload = make(conversations(tmp_path, *rows))
    assert {(bytes(item.prompt).decode(), item.output_len) for item in workload} == {("Hello you", 9), ("question", 10)}
    fixed = make(conversations(tmp_path, *rows, output_len=2))
    assert {(bytes(item.prompt).decode(), item.output_len) for item in fixed} == {
        ("Hello you", 2),
        ("question", 2),
        ("long", 2),
    }
    cut = make(conversations(tmp_path, ("a long prompt", "an answer")), context=12)
    assert [(bytes(item.prompt).decode(), item.output_len) for item in cut] == [("a l", 9)]


@pytest.mark.parametrize("form", ["array", "lines", "gz"])
@pytest.mark.parametrize("key", ["value", "content"])
def test_conversations_without_texts_are_skipped(key: str, form: str, tmp_path: Path) -> None:
    good = {"conversations": [{key: "Hello you"}, {key: "Hi, back."}]}
    rows = [
        {"conversations": None},
        None,
        {"conversations": [None, {"value": "an answer"}]},
        {"conversations": [{"value": None}, {"value": "an answer"}]},
        {"conversations": [{"from": "human"}, {"value": "an answer"}]},
        good,
    ]
    text = "\n\n".join(map(json.dumps, rows)) if form == "lines" else json.dumps(rows)
    raw = text.encode("utf-8-sig")
    (tmp_path / "c.json").write_bytes(gzip.compress(raw) if form == "gz" else raw)
    workload = make(ShareGptConfig(path=str(tmp_path / "c.json")))
    assert [(bytes(item.prompt).decode(), item.output_len) for item in workload] == [("Hello you", 9)]


def test_sharegpt_draws_by_its_seed(tmp_path: Path) -> None:
    rows = [(f"prompt {n:03}", "answer") for n in range(50)]

    def drawn(seed: int) -> list[str]:
        return [bytes(item.prompt).decode() for item in make(conversations(tmp_path, *rows, num_prompts=9, seed=seed))]

    assert len(set(drawn(1))) == 9
    assert drawn(1) == drawn(1) != drawn(2)
    assert set(drawn(1)) <= {row[0] for row in rows}


def test_files_that_are_no_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    for content, line in [
        (b"{", f"{path}: not ShareGPT's JSON, a list of"),
        (b'[{"conversations": 3}]', "Expected `array | null`, got `int`"),
        (b'[{"conversations": []}]', f"{path}: has no conversation with two turns of at least 4 tokens"),
        (b'{"data": [{"conversations": []}]}', "{conversations: [{value: ...}]}; its first object has data"),
        (b'[{"messages": [], "id": 1}]', "{conversations: [{value: ...}]}; its first object has messages, id"),
        (b"\xff", f"{path}: not ShareGPT's JSON, a list of"),
        (gzip.compress(b"[" + b" " * 10**6)[:-9], f"workload.path={path}: cannot be read"),
        (
            b'[{"conversations": [{"value": "a prompt", "value": "b"}, {"value": "an answer"}]}]',
            f"{path}: duplicate key 'value'",
        ),
    ]:
        path.write_bytes(content)
        assert line in error(ShareGptConfig(path=str(path)))
    assert error(ShareGptConfig(path="none.json")) == "workload.path=none.json: no such file"
    one = conversations(tmp_path, ("a prompt", "an answer"), num_prompts=2)
    assert error(one) == f"workload.num_prompts=2: {path} has 1 usable conversations"


ROOM = "but a request may have 1000 (model.max_model_len or KV-cache capacity)"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (FixedConfig(), f"workload=fixed: requests have up to 1152 tokens, {ROOM}; workload.input_len=872 fits"),
        (
            FixedConfig(range_ratio=0.5),
            f"workload=fixed: requests have up to 1728 tokens, {ROOM}; workload.input_len=538 fits",
        ),
        (
            FixedConfig(input_len=None, pd_ratio=8.0, output_len=500),
            f"workload=fixed: requests have up to 4500 tokens, {ROOM}; workload.output_len=111 fits",
        ),
        (
            FixedConfig(output_len=5000),
            f"workload=fixed: requests have up to 6024 tokens, {ROOM}; "
            "lower workload.input_len and workload.output_len",
        ),
        (
            ZipfConfig(min_len=10),
            f"workload.max_len=4096: some requests have this length, {ROOM}; workload.max_len=1000 fits",
        ),
        (ZipfConfig(), f"workload.max_len=4096: some requests have this length, {ROOM}; lower min_len too"),
    ],
)
def test_lengths_over_the_context_say_what_fits(config: WorkloadConfig, line: str) -> None:
    assert error(config, context=1000) == line
