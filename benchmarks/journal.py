"""Measures what `serve.journal` costs: `python -m benchmarks.journal`.

A server over two stages has many streams open. Its control time is the CPU time of the front and of the engine's
process. The journal that it wrote meanwhile is then written once more, record by record by the same code, and timed:
that over the control time is the journal's share. `us/token` is the control time for each token, with and without a
journal, by turns. Words after the options are overrides of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gapless.runtime.serving.journal import Journal, payloads

from .soak import roles_of
from .support.results import add_json_option, write_json
from .support.server import Server, gapless_server
from .support.unbroken import Clients, questions

_TICKS = os.sysconf("SC_CLK_TCK")
_REPEATS = 5


def control_seconds(server: Server) -> float:
    """CPU time of the front and its engine so far."""
    seconds = 0.0
    for pid, role in roles_of(server.process.pid).items():
        if role.startswith(("front", "engine")):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / _TICKS
    return seconds


async def load(server: Server, streams: int, seconds: float, journal: Path | None) -> tuple[float, int, bytes]:
    """Have `streams` open for some seconds; return the control time, the tokens that came, and what was journaled."""
    clients = Clients(server, questions(streams, 64, 300))
    await clients.learn()
    before, begin = control_seconds(server), 0 if journal is None else journal.stat().st_size
    running = asyncio.create_task(clients.run(streams))
    await asyncio.sleep(seconds)
    clients.end()
    await running
    assert not clients.outcome.lost, clients.outcome.lost[0]
    control = control_seconds(server) - before
    return control, len(clients.outcome.token_times), b"" if journal is None else journal.read_bytes()[begin:]


def seconds_to_write(data: bytes, folder: Path) -> float:
    """CPU time that the records of a journal take to be written, at the least."""
    written = [bytes(payload) for payload in payloads(memoryview(data))]
    found = []
    for number in range(_REPEATS):
        journal = Journal(folder / f"again-{number}", "", "")
        began = time.process_time()
        for payload in written:
            journal.write_encoded(payload)
        found.append(time.process_time() - began)
        journal.close()
    return min(found)


def turn(streams: int, seconds: float, overrides: list[str]) -> dict[str, Any]:
    """Load a server with a journal, and one without."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        with gapless_server(["parallel=pp2", "parallel.threads=1", f"serve.journal={path}", *overrides]) as server:
            asyncio.run(load(server, streams, 1.0, path))
            control, tokens, data = asyncio.run(load(server, streams, seconds, path))
        writing = seconds_to_write(data, Path(folder))
    with gapless_server(["parallel=pp2", "parallel.threads=1", *overrides]) as server:
        asyncio.run(load(server, streams, 1.0, None))
        control_without, tokens_without, _ = asyncio.run(load(server, streams, seconds, None))
    return {
        "streams": streams, "tokens": tokens, "bytes_per_token": len(data) / tokens,
        "records": sum(1 for _ in payloads(memoryview(data))), "journal_s": writing, "control_s": control,
        "journal_share": writing / control, "with_us_per_token": 1e6 * control / tokens,
        "without_us_per_token": 1e6 * control_without / tokens_without,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="of load, each time")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32, 96])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    add_json_option(parser)
    arguments = parser.parse_args()
    rows = []
    for number in range(arguments.turns):
        for streams in arguments.streams:
            rows.append(turn(streams, arguments.seconds, arguments.overrides))
            print(f"turn {number}: {streams} streams, {rows[-1]['journal_share']:.2%}", file=sys.stderr, flush=True)
    print(f"{'streams':>7}{'records':>9}{'bytes/token':>13}{'journal':>11}{'control':>10}{'share':>8}{'us/token':>10}"
          f"{'without':>9}")  # fmt: skip
    for streams in arguments.streams:
        found = [row for row in rows if row["streams"] == streams]
        middle = {key: statistics.median(row[key] for row in found) for key in found[0]}
        print(f"{streams:7}{middle['records']:9.0f}{middle['bytes_per_token']:13.1f}{middle['journal_s']:9.3f} s"
              f"{middle['control_s']:8.1f} s{middle['journal_share']:8.2%}{middle['with_us_per_token']:10.1f}"
              f"{middle['without_us_per_token']:9.1f}")  # fmt: skip
    write_json(arguments.json, "journal", {"journal": rows})


if __name__ == "__main__":
    main()
