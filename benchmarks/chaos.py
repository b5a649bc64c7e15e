"""Has the ranks of a loaded server fail for minutes, and checks that nothing is lost: `python -m benchmarks.chaos`.

For each grid a server of the package's model starts under Ray. Its answers without faults are the right ones. Then
clients keep `--streams` streams open, while every `--every` seconds something fails that is drawn at random:

- `kill`, `stop`: a rank ends, or hangs.
- `cut`, `cut control`: the connections between two ranks are reset, or those between a rank and the coordinator.
- `kill two`: two ranks end at once.
- `kill again`: a rank ends, and another one 2 seconds later, while the first is repaired.
- `garbage`: a rank ends, and strangers send nonsense to each open port of the engine and the ranks during the repair.
- `node`, only with `--nodes`: a Ray node that holds a rank is lost, and another one comes five seconds later.
- `none`, only where `--kinds` names it: nothing fails, to compare with.

A stream is lost if it ended early or with an error, and doubled if it got more tokens than it asked for. Its text is
different if any token is not that of the run without faults. `rounding` counts those where that token is as likely as
the one in its place, within 1e-4 (`benchmarks/support/unbroken.py`): they come without faults too. `pause` is the
longest time, from a fault to the next one, in which no client got a token; the parts are the server's own. Words after
the options are overrides of the server. With `--nodes` its ranks are spread over a Ray cluster of a node a stage and
one more, all on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gapless.conf.schema import ServeConfig
from gapless.launch.compose import compose_one

from .soak import roles_of
from .support.faults import cut, cut_among, kill, ranks_below, stop
from .support.processes import MemoryLog
from .support.ray_nodes import RayNodes
from .support.results import add_json_option, write_json
from .support.server import Server, gapless_server
from .support.sockets import sockets_of
from .support.unbroken import Clients, questions

PARTS = ("detect", "stop", "start", "rendezvous", "weights")
_AGAIN_S = 2.0
_GARBAGE_S = 8.0
_STAND_S = 120.0  # a repair takes less


def recovery_seconds(server: Server) -> dict[str, float]:
    """Seconds of all repairs so far, by part."""
    found = re.findall(r'^gapless:recovery_seconds_total\{.*part="(\w+)".*\} (\S+)$', server.get("/metrics"), re.M)
    return dict.fromkeys(PARTS, 0.0) | {part: float(value) for part, value in found}


def engine_of(server: Server) -> int:
    return next(pid for pid, role in roles_of(server.process.pid).items() if role.startswith("engine"))


def listening_ports(pids: Sequence[int]) -> set[int]:
    """The TCP ports at which these processes listen, by IPv4."""
    return {each.port for pid in pids for each in sockets_of(pid, ("tcp",)) if each.is_listening}


class Faults:
    """What can fail on a server."""

    def __init__(self, server: Server, rng: random.Random, nodes: RayNodes | None = None) -> None:
        self._server = server
        self._rng = rng
        self._nodes = nodes
        self.kinds: dict[str, Callable[[], None]] = {
            "kill": lambda: kill(self._one()), "stop": lambda: stop(self._one()), "cut": self._cut,
            "cut control": self._cut_control, "kill two": self._kill_two, "kill again": self._kill_again,
            "garbage": self._garbage, "none": lambda: None,
        }  # fmt: skip
        if nodes is not None:
            self.kinds["node"] = lambda: nodes.lose_one(rng)

    def _ranks(self) -> list[int]:
        return ranks_below(self._server.process.pid) if self._nodes is None else self._nodes.ranks()

    def _one(self) -> int:
        return self._rng.choice(self._ranks())

    def _cut(self) -> None:
        assert cut_among(self._ranks()) > 0

    def _cut_control(self) -> None:
        assert cut(engine_of(self._server), self._one()) > 0

    def _kill_two(self) -> None:
        for pid in self._rng.sample(self._ranks(), 2):
            kill(pid)

    def _kill_again(self) -> None:
        first, second = self._rng.sample(self._ranks(), 2)
        kill(first)
        time.sleep(_AGAIN_S)
        with contextlib.suppress(ProcessLookupError):
            kill(second)

    def _garbage(self) -> None:
        """Kill a rank, and send nonsense to every port that is open while another one joins."""
        kill(self._one())
        engine, until = engine_of(self._server), time.monotonic() + _GARBAGE_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                for port in listening_ports([engine, *self._ranks()]):
                    with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                        stranger.sendall(self._rng.randbytes(self._rng.choice((1, 40, 4000))))
            time.sleep(0.05)


async def watch(memory: MemoryLog, server: Server) -> None:
    """Note the memory of the front and the engine once a second."""
    names = {server.process.pid: "front", engine_of(server): "engine"}
    while True:
        memory.sample(names)
        await asyncio.sleep(1.0)


async def until_ready(server: Server) -> None:
    deadline = time.monotonic() + _STAND_S
    while True:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(server.get, "/health/ready")
            return
        if time.monotonic() > deadline or not server.is_alive:
            raise SystemExit("the server did not stand again")
        await asyncio.sleep(0.05)


async def torment(
    server: Server,
    faults: Faults,
    kinds: Sequence[str],
    minutes: float,
    every: float,
    streams: int,
    rng: random.Random,
) -> tuple[list[dict[str, Any]], Clients, MemoryLog]:
    """Run clients and faults, for as long as each kind has come once; return a row for each fault."""
    clients, memory = Clients(server, questions(min(streams, 48), 64, 300)), MemoryLog()
    await clients.learn()
    running = asyncio.create_task(clients.run(streams))
    sampling = asyncio.create_task(watch(memory, server))
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + 60 * minutes
    order = itertools.chain(rng.sample(kinds, len(kinds)), iter(lambda: rng.choice(kinds), None))
    await asyncio.sleep(min(every, 5.0))
    while (began := time.monotonic()) < until or len(rows) < len(kinds):
        kind, before = next(order), await asyncio.to_thread(recovery_seconds, server)
        await asyncio.to_thread(faults.kinds[kind])
        await asyncio.sleep(1.0)
        await until_ready(server)
        await asyncio.sleep(max(0.0, began + every - time.monotonic()))
        await until_ready(server)
        after = await asyncio.to_thread(recovery_seconds, server)
        rows.append({"fault": kind, "at": began} | {f"{part}_s": after[part] - before[part] for part in PARTS})
        print(f"{began - until + 60 * minutes:6.0f} s  {kind}", file=sys.stderr)
    clients.end()
    ended = time.monotonic()
    await running
    sampling.cancel()
    times = np.sort(np.array(clients.outcome.token_times))
    for row, end in zip(rows, [row["at"] for row in rows[1:]] + [ended], strict=True):
        inside = times[(times > row["at"]) & (times < end)]
        row["pause_s"] = float(np.diff(inside, prepend=row.pop("at"), append=end).max())
    return rows, clients, memory


def medians(grid: str, kind: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of all faults of a kind."""
    seconds = {f"{name}_s": statistics.median(row[f"{name}_s"] for row in rows) for name in ("pause", *PARTS)}
    return {"grid": grid, "fault": kind, "times": len(rows)} | seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="in all, or until each kind has come")
    parser.add_argument("--every", type=float, default=60.0, help="seconds from fault to fault")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--grids", nargs="+", default=["pp2", "tp2_pp2"])
    parser.add_argument("--kinds", nargs="+", help="all of them by default")
    parser.add_argument("--nodes", action="store_true", help="on a Ray cluster of several nodes, which may be lost")
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    faults: list[dict[str, Any]] = []
    totals: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    for grid in arguments.grids:
        words = [f"parallel={grid}", "parallel.threads=1", "parallel.max_recoveries=1000", *overrides]
        with contextlib.ExitStack() as stack:
            nodes = None
            if arguments.nodes:
                parallel = compose_one(words, ServeConfig, "serve").parallel
                nodes = stack.enter_context(contextlib.closing(RayNodes(parallel.pp + 1, parallel.tp)))
                words.append(f"parallel.ray_address={nodes.address}")
            server, rng = stack.enter_context(gapless_server(words)), random.Random(arguments.seed)
            possible = Faults(server, rng, nodes)
            chosen = arguments.kinds or [kind for kind in possible.kinds if kind != "none"]
            rows, clients, watched = asyncio.run(torment(
                server, possible, chosen, arguments.minutes / len(arguments.grids), arguments.every, arguments.streams,
                rng,
            ))  # fmt: skip
            rounding, different = clients.split_others()
        outcome = clients.outcome
        faults += [{"grid": grid} | row for row in rows]
        memory += [{"grid": grid} | row for row in watched.growth()]
        totals.append({
            "grid": grid, "faults": len(rows), "streams": outcome.done, "lost": len(outcome.lost),
            "doubled": outcome.doubled, "different": different, "rounding": rounding,
            "tokens": len(outcome.token_times),
        })  # fmt: skip
        for text in outcome.lost[:5]:
            print(text, file=sys.stderr)
    names = ("pause", *PARTS)
    by_kind = itertools.groupby(
        sorted(faults, key=lambda row: (row["grid"], row["fault"])), lambda row: (row["grid"], row["fault"])
    )
    kinds = [medians(grid, kind, list(rows)) for (grid, kind), rows in by_kind]
    print(f"{'grid':<9}{'fault':<13}{'times':>6}" + "".join(f"{name:>12}" for name in names) + "  seconds, medians")
    for row in kinds:
        print(f"{row['grid']:<9}{row['fault']:<13}{row['times']:6}" + "".join(f"{row[f'{n}_s']:12.2f}" for n in names))
    for row in totals:
        print(
            f"{row['grid']}: {row['faults']} faults, {row['streams']:,} streams, {row['tokens']:,} tokens: "
            f"{row['lost']} lost, {row['doubled']} doubled, {row['different']} different, {row['rounding']} by rounding"
        )
    for row in memory:
        print(f"{row['grid']} {row['process']}: {row['first_mib']:.1f} to {row['last_mib']:.1f} MiB, "
              f"{row['mib_per_minute']:+.2f} MiB a minute")  # fmt: skip
    write_json(arguments.json, Path(__file__).stem, {
        "kinds": kinds, "totals": totals, "memory": memory, "faults": faults,
    })  # fmt: skip
    holds = all(row["faults"] and row["lost"] == row["doubled"] == row["different"] == 0 for row in totals)
    print("all holds" if holds else "FAILED", file=sys.stderr)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
