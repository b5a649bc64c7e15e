"""Measures how long a killed rank holds up a server, beside that server's start: `python -m benchmarks.recovery`.

In each round a server of two stages starts without and with a spare (`parallel.spares`), by turns. `cold start` is from
the command to the first token of a first request. Then streams are open, and ranks are killed one after the other.
`next token` is from the kill until any client gets a token again that was not sent before it. The parts are the
server's own. Words after the options are overrides of the server, as `model=tiny`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from .chaos import PARTS, recovery_seconds, until_ready
from .support.faults import kill, ranks_below
from .support.results import add_json_option, write_json
from .support.server import Server, gapless_server
from .support.streams import stream_all
from .support.unbroken import Clients, questions

_SETTLE_S = 6.0  # for a new spare to have imported everything
_IN_FLIGHT_S = 0.05  # what was sent before the kill has come


async def kill_ranks(server: Server, kills: int, streams: int) -> list[dict[str, Any]]:
    """Kill a rank `kills` times; return seconds until the next token, and those of the parts."""
    clients, rng = Clients(server, questions(streams, 64, 300)), random.Random(0)
    await clients.learn()
    running = asyncio.create_task(clients.run(streams))
    rows: list[dict[str, Any]] = []
    await asyncio.sleep(_SETTLE_S)
    for _ in range(kills):
        before, at = await asyncio.to_thread(recovery_seconds, server), time.monotonic()
        kill(rng.choice(ranks_below(server.process.pid)))
        await asyncio.sleep(0.5)
        await until_ready(server)
        await asyncio.sleep(_SETTLE_S)
        after = await asyncio.to_thread(recovery_seconds, server)
        rows.append({"at": at} | {f"{part}_s": after[part] - before[part] for part in PARTS})
    clients.end()
    await running
    times = np.sort(np.array(clients.outcome.token_times))
    for row in rows:
        at = row.pop("at")
        row["next_token_s"] = float(times[times > at + _IN_FLIGHT_S][0]) - at
    assert not clients.outcome.lost, clients.outcome.lost[0]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=4, help="a round")
    parser.add_argument("--streams", type=int, default=16)
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    starts: dict[int, list[float]] = {0: [], 1: []}
    kills: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for number in range(arguments.rounds):
        for spares in (0, 1) if number % 2 == 0 else (1, 0):
            began = time.monotonic()
            words = ["parallel=pp2", "parallel.threads=1", "parallel.max_recoveries=1000"]
            with gapless_server([*words, f"parallel.spares={spares}", *overrides]) as server:
                stream_all(server, [[10, 20, 30]], 1, [0.0])
                starts[spares].append(time.monotonic() - began)
                kills[spares] += asyncio.run(kill_ranks(server, arguments.kills, arguments.streams))
            print(f"round {number + 1}, {spares} spares: {starts[spares][-1]:.1f} s", file=sys.stderr)
    rows = []
    for spares in starts:
        seconds = [row["next_token_s"] for row in kills[spares]]
        start, next_token = statistics.median(starts[spares]), statistics.median(seconds)
        rows.append({
            "spares": spares, "cold_start_s": start, "next_token_s": next_token, "least_s": min(seconds),
            "most_s": max(seconds), "next_token_share": next_token / start,
        } | {f"{part}_s": statistics.median(row[f"{part}_s"] for row in kills[spares]) for part in PARTS})  # fmt: skip
    names = ("cold_start", "next_token", "least", "most", *PARTS)
    print(f"{'spares':>6}" + "".join(f"{name.replace('_', ' '):>12}" for name in names) + "  seconds; of a cold start")
    for row in rows:
        print(f"{row['spares']:6}" + "".join(f"{row[f'{name}_s']:12.2f}" for name in names)
              + f"{row['next_token_share']:16.0%}")  # fmt: skip
    write_json(arguments.json, Path(__file__).stem, {"recovery": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
