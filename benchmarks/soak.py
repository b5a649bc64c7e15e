"""Has clients come and go on a server for minutes, and checks that nothing piles up: `python -m benchmarks.soak`.

Clients ask for whole answers and for streams, leave in the middle of a stream, before the answer or before their body
is complete, and send bad bodies. Meanwhile the memory of the front, the engine and the ranks is sampled. At the end all
clients are gone, and these must hold: no request runs and no KV block is used; each answer was the one expected; for
each stage, busy and idle seconds sum to wall time; no process grows by more than `MOST_GROWTH` MiB a minute after the
warm-up, the first quarter. Words after the options are overrides of the server; without any, it has two stages.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress

from .support.harness import Benchmark, say
from .support.processes import MemoryLog, roles_of
from .support.server import Server, gapless_server
from .support.streams import http_post

MOST_GROWTH = 2.0  # MiB a minute
MOST_SECONDS_OFF = 0.5  # between a stage's seconds and wall time
_WORDS = ("import os\n", "def read(self, size=-1):\n", "class Queue:\n", "    return self.value\n", "for x in y:\n")


def stage_seconds(server: Server) -> Counter[str]:
    """Return the busy and idle seconds of each stage."""
    seconds: Counter[str] = Counter()
    for kind in ("busy", "idle"):
        for labels, value in server.metrics(f"stage_{kind}_seconds_total"):
            seconds[f"replica {labels['replica']} stage {labels['stage']}"] += value  # type: ignore[assignment]
    return seconds


class Watch:
    """What was sampled: memory by process, running requests, KV usage."""

    def __init__(self) -> None:
        self.memory, self.running, self.usage = MemoryLog(), list[float](), list[float]()

    async def sample(self, server: Server) -> None:
        roles = roles_of(server.process.pid)
        while True:
            self.running.append(await asyncio.to_thread(server.gauge, "num_requests_running"))
            self.usage.append(await asyncio.to_thread(server.gauge, "kv_cache_usage_perc"))
            self.memory.sample(roles)
            await asyncio.sleep(1.0)


class Clients:
    """Clients of one address, each in a loop of requests of all kinds."""

    KINDS = ("whole", "stream", "leaves a stream", "leaves at once", "leaves a body", "bad body", "too long", "no path")

    def __init__(self, server: Server) -> None:
        self._server = server
        self.done: Counter[str] = Counter()
        self.unexpected: list[str] = []

    async def run(self, seed: int, until: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < until:
            kind = rng.choice(self.KINDS)
            try:
                await asyncio.wait_for(self._one(kind, rng), 120)
            except (OSError, EOFError, TimeoutError, AssertionError) as error:
                self.unexpected.append(f"{kind}: {type(error).__name__}: {error}")
            self.done[kind] += 1
            await asyncio.sleep(rng.expovariate(10))

    async def _one(self, kind: str, rng: random.Random) -> None:
        reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
        try:
            tokens = rng.randint(1, 80)
            body = {
                "prompt": "".join(rng.choices(_WORDS, k=rng.randint(1, 40))),
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": rng.choice((0, 0.8)),
                "stream": "stream" in kind,
            }
            if kind == "too long":
                body["max_tokens"] = 10**6
            content = json.dumps(body).encode()
            if kind == "bad body":
                content = content[: rng.randrange(len(content))]
            request = http_post("/nothing" if kind == "no path" else "/v1/completions", content)
            writer.write(request[: -(len(content) // 2)] if kind == "leaves a body" else request)
            await writer.drain()
            if kind == "leaves a stream":
                for _ in range(rng.randint(1, 12)):
                    await reader.readline()
            elif kind.startswith("leaves"):
                await asyncio.sleep(rng.random() / 10)
            else:
                self._check(kind, tokens, await reader.read(-1))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    @staticmethod
    def _check(kind: str, tokens: int, answer: bytes) -> None:
        status = int(answer.split(b" ", 2)[1])
        assert status == {"bad body": 400, "too long": 400, "no path": 404}.get(kind, 200), answer[:300]
        if kind == "stream":
            assert answer.count(b"data: {") == tokens, answer[-300:]
        elif kind == "whole":
            assert b'"completion_tokens":%d' % tokens in answer, answer[-300:]


async def soak(server: Server, clients: int, minutes: float) -> tuple[Watch, Clients]:
    watch, all_clients = Watch(), Clients(server)
    sampling = asyncio.create_task(watch.sample(server))
    until = time.monotonic() + 60 * minutes
    await asyncio.gather(*(all_clients.run(seed, until) for seed in range(clients)))
    sampling.cancel()
    return watch, all_clients


def main() -> int:
    bench = Benchmark(__doc__, minutes=20.0, clients=16, overrides=True)
    with gapless_server(bench.given.overrides or ["parallel=pp2 parallel.threads=1"]) as running:
        asyncio.run(soak(running, 4, 0.1))
        time.sleep(1.0)
        before, began = stage_seconds(running), time.monotonic()
        watch, clients = asyncio.run(soak(running, bench.given.clients, bench.given.minutes))
        time.sleep(2.0)
        after, wall = stage_seconds(running), time.monotonic() - began
        left, usage = running.left(), running.gauge("kv_cache_usage_perc")
    for row in watch.memory.growth():
        bench.row("processes", **row)
    for name in after:
        counted = after[name] - before[name]
        bench.row("stages", stage=name, counted_s=counted, wall_s=wall, off_s=counted - wall)
    bench.row(
        "rates",
        requests_per_s=sum(clients.done.values()) / wall,
        mean_running=statistics.fmean(watch.running),
        most_running=max(watch.running),
        most_kv_usage_share=max(watch.usage),
        unexpected=len(clients.unexpected),
        requests_left=left,
        kv_usage_left_share=usage,
    )
    for kind, count in sorted(clients.done.items()):
        bench.row("requests", kind=kind, requests=count)
    say(*clients.unexpected[:10])
    holds = not clients.unexpected and not left and not usage
    holds &= all(abs(row["off_s"]) < MOST_SECONDS_OFF for row in bench.tables["stages"])
    holds &= all(row["mib_per_minute"] < MOST_GROWTH for row in bench.tables["processes"])
    return bench.end(holds)


if __name__ == "__main__":
    sys.exit(main())
