"""Calls, and answers of requests with tools, continue after a rank or the whole server dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx2
import openai
import pytest

from tests.support.processes import descendants_of
from tests.support.scripted import scripted_model
from tests.support.server import Server, serving
from tests.support.tiers import HANGS_S
from tests.support.tool_outputs import TOOLS

TEXT = " ".join(f"row {number}: {number * number}" for number in range(120))
ARGUMENTS = json.dumps({"city": TEXT})
SCRIPTS = {
    "long0": '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>",
    "table0": json.dumps({"rows": " ".join(f"line {number}: {number**3}" for number in range(120))}),
}
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()
]


def ranks_of(server: Server) -> list[int]:
    found = []
    for pid in descendants_of(server.process.pid):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RankActor"):
            found.append(pid)
    return found


@pytest.mark.slow
def test_a_rank_is_killed_in_the_middle_of_a_call(tmp_path: Path) -> None:
    """Free and forced: the client gets each part of the call once."""
    scripted_model(tmp_path / "model", SCRIPTS, "<tool_call>")
    overrides = ("model=./model", "parallel=pp2", "parallel.threads=1", "cache.num_blocks=300")
    with serving(tmp_path, *overrides) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        forced = {"type": "function", "function": {"name": "get_weather"}}
        for stage, choice in enumerate(("auto", forced)):
            asked: dict[str, Any] = {"tools": CHAT_TOOLS, "tool_choice": choice, "max_tokens": 3000, "temperature": 0}
            got, is_killed = "", False
            messages: list[Any] = [{"role": "user", "content": "long"}]
            for chunk in client.chat.completions.create(model="model", messages=messages, stream=True, **asked):
                for call in chunk.choices[0].delta.tool_calls or ():
                    got += call.function.arguments or ""
                if len(got) > 300 and not is_killed:
                    os.kill(ranks_of(server)[stage], signal.SIGKILL)
                    is_killed = True
            assert is_killed
            assert (got, chunk.choices[0].finish_reason) == (ARGUMENTS, "tool_calls")
            assert server.log.count("has recovered") == stage + 1


LONG = {"type": "object", "properties": {"rows": {"type": "string", "minLength": 500}}, "required": ["rows"]}
LONG_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": LONG, "strict": True}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (script, sampling)
    for script in ("long", "table")
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 7})
]
STARTED = 30  # tokens after which a request is on its way


def streamed(server: Server, kill: Callable[[], None]) -> list[tuple[str, list[int]]]:
    """Stream calls and answers of a form, all at once. Call `kill` when all are on their way; return ids and tokens."""
    started = Barrier(len(ASKED), kill)

    def one(asked: tuple[str, dict[str, Any]]) -> tuple[str, list[int]]:
        body = {
            **{"messages": [{"role": "user", "content": asked[0]}], "tools": [LONG_TOOL], "max_tokens": 200},
            **{"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": LONG}}},
            **{"stream": True, "return_token_ids": True, **asked[1]},
        }
        id, tokens = "", list[int]()
        try:
            with httpx2.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=HANGS_S) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {") and "choices" in (event := json.loads(line[6:])):
                        id = event["id"]
                        tokens += [token for choice in event["choices"] for token in choice.get("token_ids", ())]
                        if len(tokens) == STARTED:
                            started.wait(HANGS_S)
        except httpx2.HTTPError:  # the server has died
            pass
        return id, tokens

    with ThreadPoolExecutor(len(ASKED)) as pool:
        return [*pool.map(one, ASKED)]


@pytest.mark.slow
def test_calls_and_answers_of_a_form_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    """Where the server dies and another takes up its journal, and where a rank of that one dies."""
    scripted_model(tmp_path / "model", SCRIPTS, "<tool_call>")
    overrides = ("model=./model", "parallel.threads=1", "cache.num_blocks=300", "serve.journal=journal")
    with serving(tmp_path, *overrides) as server:
        whole = [tokens for _, tokens in streamed(server, lambda: None)]
        assert all(len(tokens) > 2 * STARTED for tokens in whole)
        cut = streamed(server, partial(os.kill, server.engines[0], signal.SIGKILL))
        assert server.process.wait(HANGS_S) == 1
    with serving(tmp_path, *overrides, "parallel=pp2") as server:
        assert f"resumed requests: {len(ASKED)}" in server.log
        for (id, tokens), expected in zip(cut, whole, strict=True):
            answer = httpx2.get(f"{server.url}/v1/chat/completions/{id}", timeout=HANGS_S).json()
            assert answer["choices"][0]["token_ids"] == expected
            assert expected[: len(tokens)] == tokens
            assert len(tokens) < len(expected)
        found = streamed(server, partial(os.kill, ranks_of(server)[1], signal.SIGKILL))
        assert [tokens for _, tokens in found] == whole
        assert server.log.count("has recovered") == 1
