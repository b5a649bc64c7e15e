"""`gapless bench url=URL`: any server of OpenAI's form under load, in the tables of our own runs."""

from __future__ import annotations

import asyncio
import csv
import itertools
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gapless.launch.cli import main
from gapless.launch.load_client import _spread, find_target, send_all
from gapless.runtime.core.work_item import WorkItem
from gapless.runtime.pipeline.protocol import PipelineError
from tests.support.closed_loops import loop
from tests.support.forked import gapless
from tests.support.server import DEAD_PROXIES, Server, serving
from tests.support.tiers import first_quick

LOAD = ("workload.num_prompts=6", "workload.input_len=16", "workload.output_len=5")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("served"), "parallel.threads=1") as started:
        yield started


class Plain:
    """A server that knows OpenAI's fields alone, and sends two tokens in an event, without a length of the body."""

    def __init__(self, failing: bool = False) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most = self.now = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, json.dumps({"data": [{"id": "theirs"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if unknown := {"ignore_eos", "return_token_ids"} & body.keys():
                    self._answer(400, json.dumps({"error": {"message": f"unknown: {unknown}"}}).encode())
                elif not body.get("stream"):
                    self._answer(200, json.dumps({"choices": [{"text": "a"}]}).encode())
                elif failing:
                    self._answer(500, b"no")
                else:
                    outer.bodies.append(body)
                    outer.keys.append(self.headers["authorization"])
                    outer.now += 1
                    outer.most = max(outer.most, outer.now)
                    self._stream(body["max_tokens"])
                    outer.now -= 1

            def _stream(self, count: int) -> None:
                events: list[dict[str, Any]] = [{"choices": [{"text": "ab"}]} for _ in range(count // 2)]
                events.append({"choices": [{"text": "", "finish_reason": "stop"}]})
                events.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": count}})
                lines = [f"data: {json.dumps(event)}\n\n" for event in events]
                self._answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def plain() -> Iterator[Plain]:
    found = Plain()
    yield found
    found.close()


def items(count: int) -> list[WorkItem]:
    return [WorkItem([1, 2, 3], 6, 0.0) for _ in range(count)]


def test_a_run_against_a_server_stands_beside_our_own(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["bench", f"url={server.url}", *LOAD, "workload.request_rate=50", "hydra.run.dir=theirs"]) == 0
    summary = json.loads((tmp_path / "theirs/summary.json").read_text())
    assert (summary["completed"], summary["failed"]) == (6, 0)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (96, 30)
    assert 0 < summary["median_ttft_ms"] <= summary["p99_ttft_ms"]
    assert summary["cached_input_tokens"] == 0
    assert "bubble_fraction" not in summary
    rows = list(csv.DictReader((tmp_path / "theirs/requests.csv").open()))
    assert [row["output_tokens"] for row in rows] == ["5"] * 6
    assert main(["bench", *LOAD, "parallel.threads=1", "hydra.run.dir=ours"]) == 0
    capsys.readouterr()
    assert main(["report", "ours", "theirs", "out=both", "figures=false"]) == 0
    shown = capsys.readouterr().out
    assert "TTFT p50" in shown
    assert (tmp_path / "both/report.html").exists()
    assert main(["report", "theirs", "figures=false"]) == 0
    assert "Idle time" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    first_quick(
        [
            ["bench", "url={url}", *LOAD],
            ["generate", "prompt=x", "parallel=pp2", "parallel.launcher=process", "parallel.threads=1"],
            ["generate", "prompt=x", "parallel=pp2", "parallel.launcher=ray", "parallel.threads=1"],
        ]
    ),
)
def test_no_proxy_of_the_environment_stands_before_loopback(server: Server, words: list[str], tmp_path: Path) -> None:
    env = {**os.environ, **DEAD_PROXIES}
    done = gapless(*(word.format(url=server.url) for word in words), cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr


def test_repeats_have_prompts_of_their_own_and_a_comparison(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ("repeats=2", "workload.max_concurrency=2", "hydra.run.dir=run")
    assert main(["bench", f"url={server.url}/v1", *LOAD, *overrides]) == 0
    numbers = json.loads((tmp_path / "run/bench.json").read_text())
    assert [run["completed"] for run in numbers["runs"]] == [6, 6]
    assert [run["cached_input_tokens"] for run in numbers["runs"]] == [0, 0]


def test_a_server_that_takes_openai_s_fields_alone(plain: Plain) -> None:
    target, longest = asyncio.run(find_target(plain.url, None, "secret", 256))
    assert (target.model, longest, target.further) == ("theirs", None, {})
    counted = [0, 0]

    def count(tokens: int, ended: int) -> None:
        counted[0] += tokens
        counted[1] += ended

    records = asyncio.run(send_all(target, items(5), loop(2), count))
    assert [record.output_tokens for record in records] == [6] * 5
    assert {record.finish_reason for record in records} == {"stop"}
    assert {record.prompt_tokens for record in records} == {9}
    assert counted == [15, 5]
    assert plain.most <= 2
    assert set(plain.keys) == {"Bearer secret"}
    assert all(a.arrival <= b.arrival for a, b in itertools.pairwise(records))


def test_a_server_that_answers_nothing_is_one_error() -> None:
    failing = Plain(failing=True)
    target, _ = asyncio.run(find_target(failing.url, None, "", 256))
    with pytest.raises(PipelineError, match="all 3 requests failed; the first: status 500: no"):
        asyncio.run(send_all(target, items(3), None, lambda tokens, ended: None))
    failing.close()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["url=ftp://x"], "url='ftp://x': must be null or http://HOST:PORT"),
        (
            ["url=http://127.0.0.1:9"],
            "url=http://127.0.0.1:9: no OpenAI-compatible server responds (connection refused)",
        ),
        (
            ["url=http://127.0.0.1:9", "scheduler=sarathi,orca_best"],
            "url=http://127.0.0.1:9: the server has its own policy; remove scheduler",
        ),
    ],
)
def test_wrong_keys_are_one_line(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    assert capfd.readouterr().err == f"gapless: error: {line}\n"


@pytest.mark.parametrize(
    ("times", "count", "found"),
    [([1.0, 2.0], 2, [1.0, 2.0]), ([1.0, 2.0], 5, [1.0, 1.0, 1.0, 2.0, 2.0]), ([], 3, []), ([1.0, 2.0], 1, [1.0, 2.0])],
)
def test_tokens_that_came_in_one_event_have_its_time(times: list[float], count: int, found: list[float]) -> None:
    assert _spread(times, count) == found
