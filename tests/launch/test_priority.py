"""`priority` of a request: of a server, of `bench` and of `simulate`."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from gapless.launch.cli import main
from tests.support.server import Server, serving

ORDER = "scheduler.order=priority"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("priority")
    with serving(folder, "parallel.threads=1", ORDER, "scheduler.batch=1", "parallel.depth=1") as started:
        yield started


def complete(server: Server, **fields: object) -> httpx2.Response:
    body = {"prompt": "def ", "max_tokens": 2, **fields}
    return httpx2.post(f"{server.url}/v1/completions", json=body)


def test_a_running_request_gives_way_and_goes_on_later(server: Server) -> None:
    body = {"prompt": "def ", "max_tokens": 400, "ignore_eos": True, "stream": True, "priority": 9, "temperature": 0}
    events: list[str] = []
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        events.append(next(lines))
        assert complete(server, priority=1).status_code == 200
        metrics = httpx2.get(f"{server.url}/metrics").text
        events += lines
    assert sum(line.startswith("data: {") for line in events) == 400
    assert events[-2] == "data: [DONE]"
    (line,) = [line for line in metrics.splitlines() if line.startswith("gapless:num_preemptions_total")]
    assert float(line.rpartition(" ")[2]) >= 0
    whole = complete(server, max_tokens=400, ignore_eos=True, temperature=0).json()["choices"][0]["text"]
    text = "".join(text_of(line) for line in events if line.startswith("data: {"))
    assert text == whole


def text_of(line: str) -> str:
    return str(json.loads(line[6:])["choices"][0]["text"])


@pytest.mark.parametrize("priority", ["high", 1.5, 1 << 31])
def test_a_priority_is_an_integer(server: Server, priority: object) -> None:
    answer = complete(server, priority=priority)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


def test_urgent_requests_of_a_workload_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load = ("workload=fixed", "workload.num_prompts=80", "workload.input_len=512", "workload.output_len=64")
    full = ("model=llama2-70b", "parallel=tp8", "cache.num_blocks=500", "workload.request_rate=20")
    arguments = ("simulate", *full, *load, "workload.priorities=[0,1,1,1]", "hydra.run.dir=run")
    assert main([*arguments, "scheduler=token_budget", ORDER]) == 0
    rows = list(csv.DictReader((tmp_path / "run/requests.csv").open()))
    first = [float(row["ttft_ms"]) for row in rows if int(row["request"]) % 4 == 0]
    others = [float(row["ttft_ms"]) for row in rows if int(row["request"]) % 4]
    assert (len(first), len(others)) == (20, 60)
    assert statistics.median(first) < statistics.median(others) / 4
    assert sum(int(row["preemptions"]) for row in rows if int(row["request"]) % 4 == 0) == 0


@pytest.mark.slow
def test_without_that_order_a_priority_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, "parallel.threads=1") as plain:
        answer = complete(plain, priority=1)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "priority: only with scheduler.order=priority on the server"
        assert complete(plain, priority=0).status_code == 200
