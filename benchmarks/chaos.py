"""Injects faults into a loaded server for minutes and checks that nothing is lost: `python -m benchmarks.chaos`.

For each grid a server of the package's model starts under Ray; its outputs without faults are the reference. Then
clients keep `--streams` streams open, and every `--every` seconds a random fault is injected:

- `kill`, `stop`: a rank dies, or hangs.
- `cut`, `cut control`: connections between two ranks, or between a rank and the coordinator, are reset.
- `kill two`: two ranks die at once.
- `kill again`: a rank dies, and another one 2 seconds later, during the repair.
- `garbage`: a rank dies, and random bytes are sent to each open port of engine and ranks during the repair.
- `raylet`, `gcs`, `agent`, only without `--nodes`: one of Ray's own processes dies. Agents are the dashboard agent and
  the runtime-env agent; the raylet exits with either.
- `node`, only with `--nodes`: a Ray node that runs a rank is lost, and another one joins five seconds later.
- `none`, only if named in `--kinds`: no fault, as a baseline.

Downtime after a rank is killed, without and with a spare, compared with a cold start:

    python -m benchmarks.chaos --grids pp2 --spares 0,1 --kinds kill --every 10 --minutes 4 --streams 16

A stream is lost if it ends early or with an error, and doubled if it gets more tokens than requested. It is different
if any token differs from the run without faults. `rounding` counts those whose token ties with the expected one within
1e-4 (`benchmarks/support/unbroken.py`), which also happens without faults. `pause` is the longest time between a fault
and the next one during which no client gets a token; `next token` is from a fault until any client gets a token that
was not sent before it; the parts are reported by the server. `cold start` is from the command to the first token of a
first request. Overrides of the server follow the options. With `--nodes` the ranks run on a Ray cluster with one node
per stage and a spare node, all on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from gapless.conf.schema import ServeConfig
from gapless.launch.compose import compose_one
from tests.support.processes import descendants_of

from .support.faults import cut, cut_among, kill, ranks_below, ray_s_own_below, sockets_of, stop
from .support.harness import Benchmark, Row, medians, say, words
from .support.processes import MemoryLog
from .support.ray_nodes import RayNodes
from .support.server import Server, gapless_server
from .support.streams import stream_all
from .support.unbroken import Clients, questions

PARTS = ("detect", "stop", "start", "rendezvous", "weights")
_OF_RAY = {
    "raylet": ("raylet",),
    "gcs": ("gcs_server",),
    "agent": ("ray::DashboardAgent", "ray::RuntimeEnvAgent"),
}
_AGAIN_S = 2.0
_GARBAGE_S = 8.0
_STAND_S = 120.0  # longest repair
_IN_FLIGHT_S = 0.05  # tokens sent before a fault have arrived by then


def recovery_seconds(server: Server) -> dict[str, float]:
    """Return the total seconds of all repairs so far, by part."""
    found = {labels["part"]: value for labels, value in server.metrics("recovery_seconds_total")}
    return {part: found.get(part, 0.0) for part in PARTS}


def engine_of(server: Server) -> int:
    below = descendants_of(server.process.pid)
    return next(pid for pid in below if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


def listening_ports(pids: Sequence[int]) -> set[int]:
    """Return the IPv4 TCP ports on which these processes listen."""
    return {each.port for pid in pids for each in sockets_of(pid, ("tcp",)) if each.is_listening}


class Faults:
    """Injects faults into a server."""

    def __init__(self, server: Server, rng: random.Random, nodes: RayNodes | None = None) -> None:
        self._server = server
        self._rng = rng
        self._nodes = nodes
        self._num_ranks = len(self._ranks())
        self.kinds: dict[str, Callable[[], None]] = {
            "kill": lambda: kill(self._one()),
            "stop": lambda: stop(self._one()),
            "cut": self._cut,
            "cut control": self._cut_control,
            "kill two": self._kill_two,
            "kill again": self._kill_again,
            "garbage": self._garbage,
            "none": lambda: None,
        }
        if nodes is not None:
            self.kinds["node"] = lambda: nodes.lose_one(rng)
        else:
            self.kinds |= {kind: partial(self._kill_of_ray, names) for kind, names in _OF_RAY.items()}

    def _kill_of_ray(self, names: Sequence[str]) -> None:
        kill(ray_s_own_below(self._server.process.pid, self._rng.choice(names)))

    def _ranks(self) -> list[int]:
        return ranks_below(self._server.process.pid) if self._nodes is None else self._nodes.ranks()

    def _standing(self) -> list[int]:
        """Return the ranks once all run; some may still be restarting after the previous fault."""
        deadline = time.monotonic() + _STAND_S
        while len(found := self._ranks()) < self._num_ranks and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _one(self) -> int:
        return self._rng.choice(self._standing())

    def _cut(self) -> None:
        assert cut_among(self._standing()) > 0

    def _cut_control(self) -> None:
        assert cut(engine_of(self._server), self._one()) > 0

    def _kill_two(self) -> None:
        for pid in self._rng.sample(self._standing(), 2):
            kill(pid)

    def _kill_again(self) -> None:
        first, second = self._rng.sample(self._standing(), 2)
        kill(first)
        time.sleep(_AGAIN_S)
        with contextlib.suppress(ProcessLookupError):
            kill(second)

    def _garbage(self) -> None:
        """Kill a rank, and send random bytes to every open port while its replacement joins."""
        kill(self._one())
        engine, until = engine_of(self._server), time.monotonic() + _GARBAGE_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                for port in listening_ports([engine, *self._ranks()]):
                    with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                        stranger.sendall(self._rng.randbytes(self._rng.choice((1, 40, 4000))))
            time.sleep(0.05)


async def until_ready(server: Server) -> None:
    deadline = time.monotonic() + _STAND_S
    while True:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(server.get, "/health/ready")
            return
        if time.monotonic() > deadline or not server.is_alive:
            raise SystemExit("the server did not recover")
        await asyncio.sleep(0.05)


async def torment(
    server: Server,
    faults: Faults,
    kinds: Sequence[str],
    minutes: float,
    every: float,
    streams: int,
    rng: random.Random,
) -> tuple[list[Row], Clients, MemoryLog]:
    """Run clients and inject faults until time is up and each kind has occurred; return one row per fault."""
    clients, memory = Clients(server, questions(min(streams, 48), 64, 300)), MemoryLog()
    await clients.learn()
    running = asyncio.create_task(clients.run(streams))
    sampling = asyncio.create_task(memory.watch({server.process.pid: "front", engine_of(server): "engine"}))
    rows: list[Row] = []
    until = time.monotonic() + 60 * minutes
    order = itertools.chain(rng.sample(kinds, len(kinds)), iter(lambda: rng.choice(kinds), None))
    await asyncio.sleep(min(every, 5.0))
    while (began := time.monotonic()) < until or len(rows) < len(kinds):
        kind, before = next(order), await asyncio.to_thread(recovery_seconds, server)
        at = time.monotonic()
        await asyncio.to_thread(faults.kinds[kind])
        await asyncio.sleep(1.0)
        await until_ready(server)
        await asyncio.sleep(max(0.0, began + every - time.monotonic()))
        await until_ready(server)
        after = await asyncio.to_thread(recovery_seconds, server)
        rows.append({"fault": kind, "at": at} | {f"{part}_s": after[part] - before[part] for part in PARTS})
        say(f"{began - until + 60 * minutes:6.0f} s  {kind}")
    clients.end()
    ended = time.monotonic()
    await running
    sampling.cancel()
    times = np.sort(np.array(clients.outcome.token_times))
    for row, end in zip(rows, [row["at"] for row in rows[1:]] + [ended], strict=True):
        at = row.pop("at")
        row["pause_s"] = float(np.diff(times[(times > at) & (times < end)], prepend=at, append=end).max())
        row["next_token_s"] = float(times[times > at + _IN_FLIGHT_S][0]) - at
    return rows, clients, memory


def main() -> int:
    bench = Benchmark(
        __doc__,
        overrides=True,
        minutes={"type": float, "default": 20.0, "help": "minimum, until each kind has occurred"},
        every=60.0,
        streams=100,
        grids=["pp2", "tp2_pp2"],
        spares=[0],
        kinds={"type": lambda text: text.split(","), "help": "default: all"},
        nodes={"action": "store_true", "help": "run on a Ray cluster of several nodes, and lose nodes too"},
        seed=0,
    )
    given, holds = bench.given, True
    servers = list(itertools.product(given.grids, given.spares))
    for grid, spares in servers:
        parallel = f"parallel={grid} parallel.spares={spares} parallel.threads=1 parallel.max_recoveries=1000"
        keys = words(parallel, *given.overrides)
        with contextlib.ExitStack() as stack:
            nodes = None
            if given.nodes:
                mesh = compose_one(keys, ServeConfig, "serve").parallel
                nodes = stack.enter_context(contextlib.closing(RayNodes(mesh.pp + 1, mesh.tp)))
                keys.append(f"parallel.ray_address={nodes.address}")
            began = time.monotonic()
            server, rng = stack.enter_context(gapless_server(keys)), random.Random(given.seed)
            stream_all(server, [[10, 20, 30]], 1, [0.0])
            start = time.monotonic() - began
            possible, minutes = Faults(server, rng, nodes), given.minutes / len(servers)
            kinds = given.kinds or [kind for kind in possible.kinds if kind != "none"]
            rows, clients, memory = asyncio.run(
                torment(server, possible, kinds, minutes, given.every, given.streams, rng)
            )
            rounding, different = clients.split_others()
        where: Row = {"grid": grid, "spares": spares}
        for kind in sorted({row["fault"] for row in rows}):
            of = [row for row in rows if row["fault"] == kind]
            tokens = [row["next_token_s"] for row in of]
            seconds = medians(of, "pause_s", "next_token_s") | {"least_s": min(tokens), "most_s": max(tokens)}
            parts = medians(of, *(f"{part}_s" for part in PARTS))
            bench.row("kinds", **where, fault=kind, times=len(of), **seconds, **parts)
        outcome = clients.outcome
        counts = {"faults": len(rows), "streams": outcome.done, "tokens": len(outcome.token_times)}
        bad = {"lost": len(outcome.lost), "doubled": outcome.doubled, "different": different}
        bench.row("totals", **where, cold_start_s=start, **counts, **bad, rounding=rounding)
        for name, found in (("memory", memory.growth()), ("faults", rows)):
            for row in found:
                bench.row(name, **where, **row)
        say(*outcome.lost[:5])
        holds &= bool(rows) and not any(bad.values())
    return bench.end(holds, hidden=["faults"])


if __name__ == "__main__":
    sys.exit(main())
