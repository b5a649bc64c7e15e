"""Sends malformed bodies to a server and checks that each is answered: `python -m benchmarks.malformed`.

They are cut, nested too deep, of wrong types or absurd sizes, no UTF-8 or no JSON, and go to every path that takes a
POST, over `--clients` connections. It prints the answers by path and status, and fails if one is an error of the server
(5xx), if an answer takes more than `MOST_SECONDS`, if a good request among them is not answered as it was at first, or
if a request is left at the end. Words after the options are overrides of the server; its model is the package's, with a
chat template. Three minutes for 10,000 on 2 cores.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

import gapless.models

from .support.malformed import PATHS, Malformed, malformed
from .support.results import add_json_option, write_json
from .support.server import Server, gapless_server

MOST_SECONDS = 5.0
_EACH = 20  # malformed requests of a client to a good one
_GOOD = {"prompt": "import os\n", "max_tokens": 4, "temperature": 0}
_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"


@dataclass
class Answers:
    """What came back: counts and longest seconds by path and status, and what must not be."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    slowest: dict[tuple[str, int], float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    good: int = 0

    def add(self, request: Malformed, status: int, seconds: float, text: str) -> None:
        key = request.path, status
        self.counts[key] += 1
        self.slowest[key] = max(self.slowest.get(key, 0.0), seconds)
        if status >= 500 or seconds > MOST_SECONDS:
            self.note(request, f"{status} after {seconds:.1f} s: {text[:300]}")

    def note(self, request: Malformed, text: str) -> None:
        self.wrong.append(f"{request.kind}, {request.target[:80]}, {request.content[:300]!r}: {text}")


async def client(server: Server, requests: Iterator[Malformed], expected: str, answers: Answers) -> None:
    """Send what is left of `requests`, which all clients share, and a good request now and then."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=4 * MOST_SECONDS) as http:
        for number, request in enumerate(requests, 1):
            began = time.monotonic()
            try:
                answer = await http.post(request.target, content=request.content, headers=request.headers)
                answers.add(request, answer.status_code, time.monotonic() - began, answer.text)
            except (httpx2.HTTPError, UnicodeError) as error:
                answers.note(request, f"{type(error).__name__}: {error}")
            if number % _EACH == 0:
                text = (await http.post("/v1/completions", json=_GOOD)).json()["choices"][0]["text"]
                answers.good += 1
                if text != expected:
                    answers.note(request, f"afterwards a good request got {text!r} instead of {expected!r}")


async def send(server: Server, count: int, clients: int, seed: int) -> Answers:
    answers = Answers()
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
        expected = (await http.post("/v1/completions", json=_GOOD)).json()["choices"][0]["text"]
    requests = (request for request, _ in zip(malformed(seed), range(count), strict=False))
    await asyncio.gather(*(client(server, requests, expected, answers) for _ in range(clients)))
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(Path(gapless.models.__path__[0]) / "shipped", model)
        (model / "chat_template.jinja").write_text(_TEMPLATE)
        with gapless_server([f"model={model}", "serve.max_body_mib=1", *overrides]) as server:
            began = time.monotonic()
            answers = asyncio.run(send(server, arguments.requests, arguments.clients, arguments.seed))
            seconds = time.monotonic() - began
            time.sleep(1.0)
            left = server.gauge("num_requests_running") + server.gauge("num_requests_waiting")
    rows = [
        {"path": path, "status": status, "requests": count, "slowest_s": answers.slowest[path, status]}
        for (path, status), count in sorted(answers.counts.items(), key=lambda one: (PATHS.index(one[0][0]), one[0][1]))
    ]
    print(f"{'path':<24}{'status':>8}{'requests':>10}{'slowest':>10}")
    for row in rows:
        print(f"{row['path']:<24}{row['status']:>8}{row['requests']:>10,}{row['slowest_s']:>8.2f} s")
    answered = sum(answers.counts.values())
    print(f"{answered:,} of {arguments.requests:,} answered in {seconds:.0f} s, and {answers.good:,} good requests; "
          f"left at the end: {left:.0f}; wrong: {len(answers.wrong)}")  # fmt: skip
    for text in answers.wrong[:20]:
        print(text, file=sys.stderr)
    totals = [{"requests": arguments.requests, "answered": answered, "good": answers.good, "seconds": seconds,
               "left": left, "wrong": len(answers.wrong)}]  # fmt: skip
    write_json(arguments.json, Path(__file__).stem, {"answers": rows, "totals": totals})
    holds = answered == arguments.requests and not answers.wrong and not left
    print("all holds" if holds else "FAILED", file=sys.stderr)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
