"""The server: real HTTP, the real engine behind it, and OpenAI's own client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gapless.conf.sampling import SamplingParams
from gapless.runtime import LLM
from tests.support.processes import descendants_of, is_alive

PROMPT = "import os\n"


class Server:
    """`gapless serve` in a process of its own."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gapless.launch.cli", "serve", "serve.port=0", *overrides],
            stderr=self._log, cwd=folder,
        )  # fmt: skip
        self.url = self._await(r"listens at (http://\S+);")

    def _await(self, pattern: str, seconds: float = 60.0) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.search(pattern, self.log):
                return found.group(1)
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        raise AssertionError(self.log)

    @property
    def log(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()

    def until_ready(self) -> None:
        deadline = time.monotonic() + 90
        while httpx.get(f"{self.url}/health").status_code != 200:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def serving(folder: Path, *overrides: str) -> Iterator[Server]:
    server = Server(folder, *overrides)
    try:
        server.until_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), "serve.max_body_mib=1") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM("shipped") as llm:
        yield llm


def test_a_completion_is_what_the_engine_gives_offline(client: openai.OpenAI, offline: LLM) -> None:
    (expected,) = offline.generate([PROMPT], SamplingParams(max_tokens=12))
    answer = client.completions.create(model="shipped", prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_a_stream_has_an_event_for_each_token(client: openai.OpenAI, offline: LLM) -> None:
    (expected,) = offline.generate([PROMPT], SamplingParams(max_tokens=12))
    chunks = list(client.completions.create(
        model="shipped", prompt=PROMPT, max_tokens=12, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"return_token_ids": True},
    ))  # fmt: skip
    *tokens, usage = chunks
    assert [chunk.choices[0].token_ids for chunk in tokens] == [[t] for t in expected.outputs[0].token_ids]
    assert "".join(chunk.choices[0].text for chunk in tokens) == expected.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in tokens][-1] == expected.outputs[0].finish_reason
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(tokens)


def test_several_prompts_and_outputs(client: openai.OpenAI, offline: LLM) -> None:
    prompts = [PROMPT, "class A:\n"]
    expected = offline.generate(prompts, SamplingParams(max_tokens=6, n=2, temperature=0.8, seed=5))
    answer = client.completions.create(model="shipped", prompt=prompts, max_tokens=6, n=2, temperature=0.8, seed=5)
    assert [choice.text for choice in answer.choices] == [o.text for each in expected for o in each.outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = offline.tokenizer.encode(PROMPT)
    of_ids = client.completions.create(model="shipped", prompt=ids, max_tokens=6, temperature=0, echo=True)
    assert of_ids.choices[0].text.startswith(offline.tokenizer.decode(ids))


def test_stop_strings_and_logprobs(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(max_tokens=40, stop=("\n",), logprobs=2)
    (expected,) = offline.generate([PROMPT], params)
    answer = client.completions.create(
        model="shipped", prompt=PROMPT, max_tokens=40, temperature=0, stop="\n", logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text == expected.outputs[0].text
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    found = expected.outputs[0].logprobs
    assert found is not None
    values = [each[token].logprob for token, each in zip(expected.outputs[0].token_ids, found, strict=True)]
    assert choice.logprobs.token_logprobs == pytest.approx(values, abs=1e-4)
    pieces = client.completions.create(
        model="shipped", prompt=PROMPT, max_tokens=40, temperature=0, stop="\n", stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in pieces) == choice.text


def test_models_tokens_and_versions(server: Server, client: openai.OpenAI, offline: LLM) -> None:
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve(model.id).id == "shipped"
    found = httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}).json()
    assert found["tokens"] == offline.tokenizer.encode(PROMPT)
    assert found["max_model_len"] == offline.max_model_len
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert text == offline.tokenizer.decode(found["tokens"], skip_special=False)
    assert "version" in httpx.get(f"{server.url}/version").json()


WRONG: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", b"{", 400, "not JSON"),
    ("/v1/completions", b"", 400, "not JSON"),
    ("/v1/completions", b"[" * 100_000, 400, "not JSON"),
    ("/v1/completions", b'{"prompt": "\\ud800"}', 400, ""),
    ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, "not JSON"),
    ("/v1/completions", [], 400, "body"),
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", {"prompt": 5}, 400, "prompt"),
    ("/v1/completions", {"prompt": ""}, 400, "empty"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1 << 40]}, 400, "token id"),
    ("/v1/completions", {"prompt": [-1]}, 400, "token id"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**30}, 400, "too many"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 1 << 20}, 400, "too many"),
    ("/v1/completions", {"prompt": "x" * 900_000}, 400, "too many"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "temperature": "1"}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "n": 1000}, 400, "n:"),
    ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
    ("/v1/completions", {"prompt": "x", "seed": 1 << 80}, 400, "seed"),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [1 << 20]}, 400, "stop_token_ids"),
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "other"),
    ("/v1/completions", {"prompt": "x" * (1 << 21)}, 413, "max_body_mib"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 400, "chat template"),
    ("/detokenize", {"tokens": [-1]}, 400, "token id"),
    ("/nothing", {}, 404, "/nothing"),
]


@pytest.mark.parametrize(("path", "body", "status", "word"), WRONG)
def test_what_is_wrong_is_said(server: Server, path: str, body: Any, status: int, word: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(server.url + path, content=content)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert word in error["message"]


def running(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return float(re.findall(r"^gapless:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)[0])


def test_a_client_that_goes_frees_its_blocks(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 5
    while running(server) or httpx.get(f"{server.url}/load").json()["server_load"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_metrics_count_requests_and_stage_seconds(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model="shipped", prompt=PROMPT, max_tokens=8, temperature=0)
    text = httpx.get(f"{server.url}/metrics").text
    rows = re.findall(r"^(gapless:\S+?)(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    value = {name: float(number) for name, number in rows}
    assert value["gapless:generation_tokens_total"] >= 8
    assert value["gapless:time_to_first_token_seconds_count"] >= 1
    assert value["gapless:e2e_request_latency_seconds_count"] >= 1
    assert value["gapless:stage_busy_seconds_total"] > 0
    assert 'gapless:stage_idle_seconds_total{cause="control",stage="0"}' in text


def test_many_clients_at_once(server: Server) -> None:
    """Streams of 48 clients are each whole."""
    import asyncio

    async def one(http: httpx.AsyncClient, seed: int) -> int:
        body = {"prompt": PROMPT, "max_tokens": 10, "ignore_eos": True, "stream": True, "seed": seed}
        async with http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return len(lines) - 1

    async def all_of_them() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http:
            return await asyncio.gather(*(one(http, seed) for seed in range(48)))

    assert asyncio.run(all_of_them()) == [10] * 48


def test_keys_a_full_queue_and_a_drain(tmp_path: Path) -> None:
    """A second server: who has no key stays out, one request too many is turned away, SIGTERM lets the last finish."""
    (tmp_path / "keys").write_text("other\nright\n")
    with serving(tmp_path, "serve.api_keys=[@keys]", "serve.max_waiting=3", "serve.model_name=mine") as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        wrong = httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer wrong"})
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0)
        assert client.models.list().data[0].id == "mine"
        with pytest.raises(openai.RateLimitError) as turned_away:
            client.completions.create(model="mine", prompt=PROMPT, n=4)
        assert turned_away.value.response.headers["retry-after"] == "1"
        children = descendants_of(server.process.pid)
        stream = client.completions.create(
            model="mine", prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
            client.completions.create(model="mine", prompt=PROMPT)
        assert len(list(stream)) == 199
        assert server.process.wait(30) == 0
        assert not any(map(is_alive, children))


def test_a_dead_engine_never_answers_200(tmp_path: Path) -> None:
    """Open requests get an error, health says so, and the server ends with exit code 1."""
    with serving(tmp_path) as server:
        body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            (engine,) = [pid for pid in descendants_of(server.process.pid) if b"spawn_main" in command_of(pid)]
            os.kill(engine, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert "error" in json.loads(rest[-2].removeprefix("data: "))
        assert server.process.wait(30) == 1
        assert "the engine's process has died" in server.log


def test_two_stages_and_a_killed_front(tmp_path: Path) -> None:
    """Tokens over two stages are those of one; when the front is killed, the engine and its ranks end by themselves."""
    with serving(tmp_path, "parallel=pp2", "parallel.threads=1", "scheduler=equal_time") as server:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        over_two = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        children = descendants_of(server.process.pid)
        assert len(children) > 3
        text = httpx.get(f"{server.url}/metrics").text
        assert 'gapless:stage_busy_seconds_total{stage="1"}' in text
        server.process.kill()
        server.process.wait()
    deadline = time.monotonic() + 20
    while any(map(is_alive, children)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with LLM("shipped") as llm:
        (expected,) = llm.generate([PROMPT], SamplingParams(max_tokens=12))
    assert over_two == expected.outputs[0].text


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "gapless.launch.cli", "serve", f"serve.port={port}"], capture_output=True, text=True,
            cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"serve.port={port}" in done.stderr
