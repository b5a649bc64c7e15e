"""Measures how long a coding agent's request holds up the others: `python -m benchmarks.long_requests`.

Each form of a request, with many tools or with a long conversation or compressed, is sent `--rounds` times to a server
of its own that counts its tokens, so that all is measured but the engine: reading, checks, template, tokenizer. Prints
the time of an answer, and the longest for which the front's event loop answered nobody, in all and while it computed.
Words after the options are overrides of the server; its model is the package's, with a template for tools. A minute.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import httpx2

import gapless.models

from .serve import STALLS
from .support.harness import Benchmark, medians, scratch
from .support.server import gapless_server

PATH = "/v1/messages/count_tokens"
TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}<tool_call>{% for m in messages %}<{{ m.role }}> {{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}
{% endfor %}"""
SENTENCE = "Says what it is for, when to use it and when not. "
CODE = "def function_{0}(argument: int) -> str:\n    return f'{{argument}} is a number'\n"


def body(size: int, tools: int) -> bytes:
    """Return a request of `size` bytes or a little more: tools of some 2.5 KB each, then turns of calls and results."""
    edit = {"type": "object", "properties": {"old": {"type": "string"}, "new": {"type": "string"}}, "required": ["old"]}
    properties: dict[str, Any] = {f"key_{n}": {"type": "string", "description": SENTENCE * 2} for n in range(8)}
    schema = {"type": "object", "properties": {**properties, "edits": {"type": "array", "items": edit}}}
    offered = [{"name": f"tool_{n}", "description": SENTENCE * 12, "input_schema": schema} for n in range(tools)]
    messages: list[Any] = [{"role": "user", "content": "Mend the tests."}]
    left = size - len(json.dumps(offered))
    while left > 0:
        id = f"toolu_{len(messages)}"
        call = {"type": "tool_use", "id": id, "name": "tool_1", "input": {"key_1": "a.py"}}
        text = "".join(CODE.format(len(messages) * 40 + line) for line in range(40))
        messages.append({"role": "assistant", "content": [call]})
        messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]})
        left -= len(json.dumps(messages[-2:]))
    return json.dumps({"messages": messages, "tools": offered}).encode()


def main() -> int:
    bench = Benchmark(__doc__, rounds=10, overrides=True)
    given = bench.given
    forms = {"40 tools": body(200_000, 40), "no tools": body(400_000, 0), "gzip": gzip.compress(body(200_000, 40))}
    with scratch() as folder:
        model = folder / "model"
        shutil.copytree(Path(gapless.models.__path__[0]) / "shipped", model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        for name, content in forms.items():
            headers = {"content-encoding": "gzip"} if name == "gzip" else {}
            with gapless_server([f"model={model}", *given.overrides]) as server:
                turns = []
                for _ in range(given.rounds):
                    began = time.perf_counter()
                    httpx2.post(server.url + PATH, content=content, headers=headers, timeout=60).raise_for_status()
                    turns.append({"answer_ms": 1e3 * (time.perf_counter() - began)})
                    time.sleep(0.1)
                stalls = {f"longest_{each}_ms": 1e3 * server.gauge(f"front_longest_{each}_seconds") for each in STALLS}
            bench.row("requests", form=name, size_kb=len(content) / 1e3, **medians(turns), **stalls)
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
