"""The run of clients notices what fails: openai goes through its driver, as each client does."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx2

from benchmarks.clients.__main__ import SCHEMA, drive, scripts_of, server_of, table
from tests.support.scripted import scripted_model


def test_a_client_that_is_here_goes_through_its_driver(tmp_path: Path) -> None:
    openai, programs = table()["openai"], Path(sys.executable).parents[1]
    with server_of(openai, tmp_path) as url:
        for case in ("loop", "stream", "schema"):
            assert drive(openai, case, url, programs) == "yes"
        assert drive(openai, "overflow", url, programs) == "reports it, exits with 1"
    assert drive(openai, "loop", url, programs).startswith("no (1): ")  # the server is gone


def test_the_outputs_for_each_client_make_a_model(tmp_path: Path) -> None:
    """Its scripts share no token, or it is refused."""
    for name, client in table().items():
        scripted_model(tmp_path / name, scripts_of(client), "")


def test_a_model_says_the_tool_of_its_script_also_where_a_grammar_forces_bytes(tmp_path: Path) -> None:
    """The name `json"` is one token; the tool of another script may be called too."""
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get_weather", "json")]
    body = {"messages": [{"role": "user", "content": "case:schema;"}], "tools": tools, "tool_choice": "required"}
    with server_of(table()["ai-sdk-anthropic"], tmp_path) as url:
        for seed in range(8):
            answer = httpx2.post(f"{url}/v1/chat/completions", json=body | {"seed": seed}, timeout=60).json()
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "json"
