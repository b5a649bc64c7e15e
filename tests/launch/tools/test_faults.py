"""A call goes on where a rank that was writing it dies."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.processes import descendants_of
from tests.support.scripted import scripted_model
from tests.support.server import Server, serving
from tests.support.tool_outputs import TOOLS

TEXT = " ".join(f"row {number}: {number * number}" for number in range(120))
ARGUMENTS = json.dumps({"city": TEXT})
SCRIPTS = {"long0": '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"}
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
