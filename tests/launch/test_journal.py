"""A server that dies loses no request of its journal: the next one goes on with each where it was."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gapless.launch import cli
from tests.support.processes import descendants_of
from tests.support.server import serving
from tests.support.tiers import HANGS_S

PROMPT = [5, 6, 7, 8, 9] * 4
# Of two tokens the sampled one is the same whatever the batch, but for one in millions.
STREAMED: Sequence[dict[str, Any]] = (
    {"prompt": PROMPT},
    {"prompt": [PROMPT, PROMPT[3:]], "n": 2, "temperature": 1.0, "top_k": 2, "seed": 11, "repetition_penalty": 1.1},
    {"prompt": "The king", "temperature": 0.9, "top_k": 2},
    {"prompt": "def f(", "temperature": 0.8, "top_k": 2, "seed": 5, "logprobs": 2, "echo": True},
)
WHOLE: Sequence[dict[str, Any]] = (
    {"prompt": "Once", "temperature": 0.9, "top_k": 2, "seed": 3, "logprobs": 1},
    {"prompt": PROMPT[1:], "prompt_logprobs": 1},
    {"prompt": "A", "top_k": 2, "structured_outputs": {"regex": "[a-z ]{600,}"}, "ignore_eos": False},
)
TOKENS = 320
KEYS = {"Authorization": "Bearer first"}, {"Authorization": "Bearer second"}
OVERRIDES = ("serve.journal=journal", "serve.api_keys=[first,second]", "parallel.threads=1")


@dataclass
class Asked:
    """A request that a client sends, and what it saw of the answer."""

    body: dict[str, Any]
    id: str = ""
    token_ids: list[list[int]] = field(default_factory=list)
    error: str = ""

    def stream(self, url: str) -> None:
        """Read the events until the connection ends, however it does."""
        try:
            with httpx2.stream("POST", f"{url}/v1/completions", json=self.body, headers=KEYS[0]) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except httpx2.HTTPError as error:
            self.error = self.error or str(error)

    def ask(self, url: str) -> None:
        headers = {**KEYS[0], "X-Request-Id": self.id}
        try:
            answer = httpx2.post(f"{url}/v1/completions", json=self.body, headers=headers)
            self.error = answer.text
        except httpx2.HTTPError as error:
            self.error = str(error)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
            return
        self.id = event["id"]
        for choice in event["choices"]:
            while len(self.token_ids) <= choice["index"]:
                self.token_ids.append([])
            self.token_ids[choice["index"]] += choice["token_ids"]


def expected_of(url: str, asked: Asked, number: int) -> list[Any]:
    """Return the choices of a request on a server that does not fail, with the seed that its number stands for."""
    seeds = {} if asked.body.get("seed") is not None else {"seed": number}
    body = asked.body | {"stream": False} | seeds
    return httpx2.post(f"{url}/v1/completions", json=body, headers=KEYS[0]).json()["choices"]


def differences(found: Any, expected: Any, at: str = "") -> list[str]:
    """Where two JSON values differ, but for the last digits of floats: sums in another order differ there."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        return [one for key in found for one in differences(found[key], expected[key], f"{at}.{key}")]
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [one for place, pair in pairs for one in differences(*pair, f"{at}[{place}]")]
    if isinstance(found, float) and isinstance(expected, float) and abs(found - expected) < 1e-3:
        return []
    return [] if found == expected else [f"{at}: {found!r} is not {expected!r}"]


@pytest.mark.slow
def test_requests_outlive_their_engine_and_their_server(tmp_path: Path) -> None:
    common = {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    streamed = [Asked(common | body | {"stream": True}) for body in STREAMED]
    whole = [Asked(common | body, f"mine-{number}") for number, body in enumerate(WHOLE)]
    every = [*streamed, *whole]
    with serving(tmp_path, *OVERRIDES) as server:
        threads = []
        for asked in every:  # one after the other, so that their numbers are known
            target = asked.stream if asked in streamed else asked.ask
            threads.append(threading.Thread(target=target, args=(server.url,)))
            before = httpx2.get(f"{server.url}/load").json()["server_load"]
            threads[-1].start()
            until(lambda: httpx2.get(f"{server.url}/load").json()["server_load"] > before or asked.error)  # noqa: B023
            if asked is whole[0]:  # at once, while it runs for sure
                headers = {**KEYS[0], "X-Request-Id": asked.id}
                doubled = httpx2.post(f"{server.url}/v1/completions", json=asked.body, headers=headers)
                assert (doubled.status_code, asked.id in doubled.text) == (409, True)
        until(lambda: all(asked.token_ids and len(asked.token_ids[0]) > 20 for asked in streamed))
        (engine,) = server.engines
        os.kill(engine, signal.SIGKILL)
        assert server.process.wait(HANGS_S) == 1
        for thread in threads:
            thread.join(HANGS_S)
        assert all("died" in asked.error for asked in every), every[-1].error
    seen = [len(asked.token_ids[0]) for asked in streamed]
    assert all(20 < each < TOKENS for each in seen)

    with serving(tmp_path, *OVERRIDES) as server:  # dies with all of its processes, before much is done
        assert f"resumed requests: {len(every)}" in server.log
        time.sleep(0.3)
        for pid in [server.process.pid, *descendants_of(server.process.pid)]:
            os.kill(pid, signal.SIGKILL)
        server.process.wait()

    with serving(tmp_path, *OVERRIDES) as server:
        number = 0
        for asked in every:
            path = f"{server.url}/v1/completions/{asked.id}"
            assert httpx2.get(path, headers=KEYS[1]).status_code == 404
            assert httpx2.get(path).status_code == 401
            assert httpx2.get(path.replace("completions", "chat/completions"), headers=KEYS[0]).status_code == 404
            answer = httpx2.get(path, headers=KEYS[0]).json()
            assert answer == httpx2.get(path, headers=KEYS[0]).json()
            assert answer["id"] in (asked.id, f"cmpl-{asked.id}")
            assert differences(answer["choices"], expected_of(server.url, asked, number)) == []
            for known, choice in zip(asked.token_ids, answer["choices"], strict=False):
                assert choice["token_ids"][: len(known)] == known
            number += len(answer["choices"])
        again = httpx2.post(
            f"{server.url}/v1/completions", json=whole[0].body, headers={**KEYS[0], "X-Request-Id": "mine-0"}
        )
        assert again.status_code == 409
        assert server.stop() == 0


def until(done: Any) -> None:
    deadline = time.monotonic() + HANGS_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_wrong_journal_is_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    letter = tmp_path / "letter"
    letter.write_text("no journal")
    assert cli.main(["serve", "model=shipped", f"serve.journal={letter}"]) == 2
    assert f"serve.journal={letter}: is not a journal" in capsys.readouterr().err
