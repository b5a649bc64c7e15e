"""Measures what `serve.journal` costs: `python -m benchmarks.journal`.

A server over two stages has many streams open. Its control time is the CPU time of the front and of the engine's
process. The journal that it wrote meanwhile is then written once more, record by record by the same code, and timed:
that over the control time is the journal's share. `us/token` is the control time for each token, with and without a
journal, by turns. Words after the options are overrides of the server.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from gapless.runtime.serving.journal import Journal, payloads

from .support.harness import Benchmark, Row, medians, scratch
from .support.processes import roles_of
from .support.server import Server, gapless_server
from .support.unbroken import Clients, questions

_TICKS = os.sysconf("SC_CLK_TCK")
_REPEATS = 5


def control_seconds(server: Server) -> float:
    """Return the CPU time of the front and its engine so far."""
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
    """Return the CPU time that the records of a journal take to be written, at the least."""
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


def turn(streams: int, seconds: float, overrides: list[str]) -> Row:
    """Load a server with a journal, and one without."""
    found = []
    with scratch() as folder:
        for path in (folder / "journal", None):
            journal = f"serve.journal={path or 'null'}"
            with gapless_server(["parallel=pp2 parallel.threads=1", journal, *overrides]) as server:
                asyncio.run(load(server, streams, 1.0, path))
                found.append(asyncio.run(load(server, streams, seconds, path)))
        (control, tokens, data), (control_without, tokens_without, _) = found
        writing = seconds_to_write(data, folder)
    records = sum(1 for _ in payloads(memoryview(data)))
    written = {"tokens": tokens, "bytes_per_token": len(data) / tokens, "records": records, "journal_s": writing}
    each = {"with_us_per_token": 1e6 * control / tokens, "without_us_per_token": 1e6 * control_without / tokens_without}
    return {"streams": streams, **written, "control_s": control, "journal_share": writing / control, **each}


def main() -> int:
    bench = Benchmark(__doc__, turns=3, seconds=12.0, streams=[8, 32, 96], overrides=True)
    given = bench.given
    for _ in range(given.turns):
        for streams in given.streams:
            bench.row("journal", **turn(streams, given.seconds, given.overrides))
    for streams in given.streams:
        bench.row("medians", **medians([row for row in bench.tables["journal"] if row["streams"] == streams]))
    return bench.end(hidden=["journal"])


if __name__ == "__main__":
    sys.exit(main())
