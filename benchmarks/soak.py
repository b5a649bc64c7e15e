"""Has clients come and go on a server for minutes, and checks that nothing piles up: `python -m benchmarks.soak`.

Clients ask for whole answers and for streams, leave in the middle of a stream, before the answer or before their body
is complete, and send bad bodies. Meanwhile the memory of the front, the engine and the ranks is sampled. At the end all
clients are gone, and these must hold: no request runs and no KV block is used; each answer was the one expected; for
each stage, busy and idle seconds sum to wall time; no process grows by more than `MOST_GROWTH` MiB a minute after the
warm-up, the first quarter. Words after the options are overrides of the server; without any, it has two stages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .support.processes import MemoryLog, descendants_of
from .support.results import add_json_option, write_json
from .support.server import Server, gapless_server

MOST_GROWTH = 2.0  # MiB a minute
MOST_SECONDS_OFF = 0.5  # between a stage's seconds and wall time
_INTERVAL_S = 1.0
_WORDS = ("import os\n", "def read(self, size=-1):\n", "class Queue:\n", "    return self.value\n", "for x in y:\n")


def stage_seconds(server: Server) -> dict[str, float]:
    """Busy and idle seconds of each stage."""
    seconds: dict[str, float] = {}
    pattern = r'^gapless:stage_(?:busy|idle)_seconds_total\{.*replica="(\d+)",stage="(\d+)"\} (\S+)$'
    for replica, stage, value in re.findall(pattern, server.get("/metrics"), re.MULTILINE):
        name = f"replica {replica} stage {stage}"
        seconds[name] = seconds.get(name, 0.0) + float(value)
    return seconds


def roles_of(front: int) -> dict[int, str]:
    """The processes to watch: the front, and below it engines and Ray's actors."""
    roles, ranks = {front: "front"}, 0
    for child in descendants_of(front):
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"spawn_main" in command:
            roles[child] = f"engine {sum(role.startswith('engine') for role in roles.values())}"
        elif command.startswith(b"ray::RankActor"):
            roles[child] = f"rank process {ranks}"
            ranks += 1
    return roles


@dataclass
class Watch:
    """What was sampled: memory by process, running requests, KV usage."""

    memory: MemoryLog = field(default_factory=MemoryLog)
    running: list[float] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)

    async def sample(self, server: Server) -> None:
        roles = roles_of(server.process.pid)
        while True:
            text = await asyncio.to_thread(server.get, "/metrics")
            for into, name in ((self.running, "num_requests_running"), (self.usage, "kv_cache_usage_perc")):
                into.append(sum(map(float, re.findall(rf"^gapless:{name}\{{.*\}} (\S+)$", text, re.MULTILINE))))
            self.memory.sample(roles)
            await asyncio.sleep(_INTERVAL_S)


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
                "prompt": "".join(rng.choices(_WORDS, k=rng.randint(1, 40))), "max_tokens": tokens, "ignore_eos": True,
                "temperature": rng.choice((0, 0.8)), "stream": "stream" in kind,
            }  # fmt: skip
            if kind == "too long":
                body["max_tokens"] = 10**6
            content = json.dumps(body).encode()
            if kind == "bad body":
                content = content[: rng.randrange(len(content))]
            path = "/nothing" if kind == "no path" else "/v1/completions"
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
            writer.write(head.encode() + (content[: len(content) // 2] if kind == "leaves a body" else content))
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=16)
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    with gapless_server(overrides or ["parallel=pp2", "parallel.threads=1"]) as running:
        asyncio.run(soak(running, 4, 0.1))
        time.sleep(1.0)
        before, began = stage_seconds(running), time.monotonic()
        watch, clients = asyncio.run(soak(running, arguments.clients, arguments.minutes))
        time.sleep(2.0)
        after, wall = stage_seconds(running), time.monotonic() - began
        left = {"requests": running.gauge("num_requests_running") + running.gauge("num_requests_waiting"),
                "kv_usage": running.gauge("kv_cache_usage_perc")}  # fmt: skip
    processes = watch.memory.growth()
    counted = {name: after[name] - before[name] for name in after}
    stages = [
        {"stage": name, "counted_s": seconds, "wall_s": wall, "off_s": seconds - wall}
        for name, seconds in counted.items()
    ]
    kinds = [{"kind": kind, "requests": count} for kind, count in sorted(clients.done.items())]
    rates = [{
        "requests_per_s": sum(clients.done.values()) / wall, "mean_running": statistics.fmean(watch.running),
        "most_running": max(watch.running), "most_kv_usage_share": max(watch.usage),
        "unexpected": len(clients.unexpected), "requests_left": left["requests"],
        "kv_usage_left_share": left["kv_usage"],
    }]  # fmt: skip
    print(f"{'process':<18}{'first':>10}{'last':>10}{'most':>10} MiB{'MiB a minute':>16}")
    for row in processes:
        print(f"{row['process']:<18}{row['first_mib']:10.1f}{row['last_mib']:10.1f}{row['most_mib']:10.1f}"
              f"{row['mib_per_minute']:20.2f}")  # fmt: skip
    print(f"\n{'stage':<20}{'counted':>12}{'wall':>12}{'off':>10}")
    for row in stages:
        print(f"{row['stage']:<20}{row['counted_s']:10.1f} s{row['wall_s']:10.1f} s{row['off_s']:8.3f} s")
    (rate,) = rates
    print(f"\n{rate['requests_per_s']:.1f} requests/s; {rate['mean_running']:.1f} run at once, "
          f"{rate['most_running']:.0f} at most; KV usage {rate['most_kv_usage_share']:.2%} at most")  # fmt: skip
    print(", ".join(f"{row['kind']} {row['requests']:,}" for row in kinds))
    print(f"left at the end: {rate['requests_left']:.0f} requests, {rate['kv_usage_left_share']:.0%} of the KV blocks; "
          f"unexpected answers: {rate['unexpected']}")  # fmt: skip
    for text in clients.unexpected[:10]:
        print(text, file=sys.stderr)
    write_json(arguments.json, Path(__file__).stem, {
        "processes": processes, "stages": stages, "rates": rates, "requests": kinds,
    })  # fmt: skip
    holds = (
        not clients.unexpected and not any(left.values())
        and all(abs(row["off_s"]) < MOST_SECONDS_OFF for row in stages)
        and all(row["mib_per_minute"] < MOST_GROWTH for row in processes)
    )  # fmt: skip
    print("all holds" if holds else "FAILED", file=sys.stderr)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
