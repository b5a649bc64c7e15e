"""Measures how long one request of an unusual form holds up the others: `python -m benchmarks.stalls`.

A server of its own streams to four clients all the time. Meanwhile each form of a request comes `--rounds` times, each
time with another content, so that nothing of it is known. Prints the time of its answer; the longest gap between two
tokens of the streams while it was on its way; and the slowest answer of `/health`, asked each 5 ms. The row `none` is
a second without such a request. Words after the options are overrides of the server; its model is the package's, with a
template for tools. A minute.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gapless.models

from .long_requests import TEMPLATE
from .support.harness import Benchmark, say, scratch
from .support.server import Server, gapless_server
from .support.streams import http_post, request_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STREAMS, TOKENS = 4, 400
MEGABYTE = 1_000_000


def completion(**fields: Any) -> Callable[[int], tuple[str, Any]]:
    return lambda number: (COMPLETIONS, {"prompt": "x", "max_tokens": 8, **{k: v(number) for k, v in fields.items()}})


def tools(number: int) -> tuple[str, Any]:
    """Return a chat with 20 tools of 52 KB together, of which one must be called."""

    def schema(tool: int) -> dict[str, Any]:
        names = [f"key_{number}_{tool}_{place}" for place in range(12)]
        each = {"type": "string", "description": "What it is for. " * 6, "enum": [f"value {n}" for n in range(8)]}
        return {"type": "object", "properties": dict.fromkeys(names, each), "required": names[:3]}

    offered = [{"type": "function", "function": {"name": f"t{n}", "parameters": schema(n)}} for n in range(20)]
    messages = [{"role": "user", "content": "Go."}]
    return CHAT, {"messages": messages, "tools": offered, "tool_choice": "required", "max_tokens": 8}


def messages(number: int) -> tuple[str, Any]:
    """Return a chat of 1 MB in short messages."""
    each = [{"role": ("user", "assistant")[n % 2], "content": f"Say {number}{n}."} for n in range(MEGABYTE // 48)]
    return CHAT, {"messages": each, "max_tokens": 8}


FORMS: dict[str, Callable[[int], tuple[str, Any]]] = {
    "none": lambda number: ("", None),
    "20,000 choices": completion(structured_outputs=lambda n: {"choice": [f"{n} and {k}" for k in range(20_000)]}),
    "(a{1000}){1000}": completion(structured_outputs=lambda n: {"regex": f"({chr(97 + n)}{{1000}}){{1000}}"}),
    "schema of 20 tools": tools,
    "prompt of 1 MB": completion(prompt=lambda n: f"{n} is a number. " * (MEGABYTE // 16)),
    "chat of 1 MB": messages,
    "1 MB nested": completion(x=lambda n: "NESTED"),
    "1 MB of objects": completion(metadata=lambda n: [{"a": k, "b": str(n)} for k in range(MEGABYTE // 20)]),
    "16 MB of ids": completion(prompt=lambda n: [7] * (4 * MEGABYTE)),
}


def request(form: str, number: int) -> bytes:
    path, body = FORMS[form](number)
    text = json.dumps(body).encode().replace(b'"NESTED"', b"[" * (MEGABYTE // 2) + b"]" * (MEGABYTE // 2))
    return http_post(path, text) if path else b""


async def ask(server: Server, sent: bytes) -> bytes:
    """Return the whole answer to a request."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(sent)
    text = await reader.read(-1)
    writer.close()
    return text


async def stream(server: Server, times: list[float]) -> None:
    """Read streams, one behind the other, and note when each event came; a new stream begins with a nan."""
    while True:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(request_of("import os\n", TOKENS))
        times.append(float("nan"))
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
        writer.close()


async def beat(server: Server, asked: list[tuple[float, float]]) -> None:
    """Ask `/health` each 5 ms over one connection, and note when, and how long the answer took."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    while True:
        began = time.perf_counter()
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        asked.append((began, time.perf_counter() - began))
        await asyncio.sleep(0.005)


async def measure(server: Server, sent: bytes) -> dict[str, Any]:
    streams: list[list[float]] = [[] for _ in range(STREAMS)]
    health: list[tuple[float, float]] = []
    tasks = [asyncio.create_task(stream(server, times)) for times in streams]
    tasks.append(asyncio.create_task(beat(server, health)))
    await asyncio.sleep(0.5)
    began = time.perf_counter()
    answer = await ask(server, sent) if sent else b"HTTP/1.1 200"
    took = time.perf_counter() - began
    await asyncio.sleep(0.3 if sent else 1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [b - a for times in streams for a, b in pairwise(times) if b >= began]
    status = answer.split()[1].decode() if answer else "none"
    slow = max(seconds for at, seconds in health if at + seconds >= began)
    return {"status": status, "answer_ms": 1e3 * took, "gap_ms": 1e3 * max(gaps), "health_ms": 1e3 * slow}


def main() -> int:
    bench = Benchmark(__doc__, rounds=3, only="", overrides=True)
    given = bench.given
    with scratch() as folder:
        model = folder / "model"
        shutil.copytree(Path(gapless.models.__path__[0]) / "shipped", model)
        (model / "chat_template.jinja").write_text(TEMPLATE.replace("tool | tojson", "tool.function.name"))
        with gapless_server([f"model={model}", *given.overrides]) as server:
            asyncio.run(measure(server, request("schema of 20 tools", 100)))
            for form in FORMS:
                if given.only in form:
                    found = [asyncio.run(measure(server, request(form, number))) for number in range(given.rounds)]
                    middle = {key: statistics.median(one[key] for one in found) for key in found[0] if key != "status"}
                    bench.row("requests", form=form, status=found[-1]["status"], **middle)
                    if not server.is_alive:
                        say("the server has died")
                        return 1
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
