"""Measures what HTTP costs the pipeline: `python -m benchmarks.serve`.

The model of the package, which hardly computes, continues as many prompts as there are clients: offline by `LLM`, and
over `gapless serve` to clients that each read a stream with an event a token. They take turns on the same cores; the
clients share them too. Prints output tokens/s, `control` as a share of stage time, and the worst delay of the front's
event loop. Words after the options are overrides of both, as `parallel=pp2`. About a minute.
"""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial

from gapless import LLM
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import ServeConfig
from gapless.launch.compose import compose_one
from gapless.runtime.ledger.causes import Cause
from gapless.runtime.ledger.ledger import Ledger

from .support.harness import Benchmark, by_turns, medians
from .support.server import Server, gapless_server
from .support.streams import request_of

PROMPT = "import os\n"
STALLS = ("stall", "own_stall")  # of the front's event loop


def offline(llm: LLM, clients: int, tokens: int) -> dict[str, float]:
    llm.reset()
    began = time.perf_counter()
    llm.generate([PROMPT] * clients, SamplingParams(max_tokens=tokens, ignore_eos=True))
    seconds = time.perf_counter() - began
    ledger = Ledger(llm.record)
    control = ledger.seconds_by_cause()[Cause.CONTROL] / ledger.stage_seconds
    return {"tokens_per_s": clients * tokens / seconds, "control_share": control}


def control_seconds(server: Server) -> float:
    """Return the `control` seconds of all stages so far."""
    idle = server.metrics("stage_idle_seconds_total")
    return sum(seconds for labels, seconds in idle if labels["cause"] == Cause.CONTROL.value)


def served(server: Server, clients: int, tokens: int) -> dict[str, float]:
    before, began = control_seconds(server), time.perf_counter()
    events = asyncio.run(_streams(server, clients, tokens))
    seconds = time.perf_counter() - began
    assert events == [tokens] * clients, events
    time.sleep(0.5)  # the ledger counts several times a second
    stages = len(server.metrics("stage_busy_seconds_total"))
    found = {f"longest_{name}_ms": 1e3 * server.gauge(f"front_longest_{name}_seconds") for name in STALLS}
    control = (control_seconds(server) - before) / (seconds * stages)
    return {"tokens_per_s": clients * tokens / seconds, "control_share": control, **found}


async def _streams(server: Server, clients: int, tokens: int) -> list[int]:
    return list(await asyncio.gather(*(_stream(server, tokens) for _ in range(clients))))


async def _stream(server: Server, tokens: int) -> int:
    """Read one stream to its end; return its events."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(request_of(PROMPT, tokens))
    text = await reader.read(-1)
    writer.close()
    return text.count(b"data: {")


def main() -> int:
    bench = Benchmark(__doc__, clients=64, tokens=200, rounds=5, overrides=True)
    given = bench.given
    config = compose_one(given.overrides, ServeConfig, "serve")
    with LLM.from_config(config) as llm, gapless_server(given.overrides) as server:
        offline(llm, given.clients, 8)
        served(server, given.clients, 8)
        ways = {"offline": partial(offline, llm), "served": partial(served, server)}
        found = by_turns(given.rounds, {name: partial(way, given.clients, given.tokens) for name, way in ways.items()})
    for name, turns in found.items():
        speeds = [one["tokens_per_s"] for one in turns]
        middle = medians(turns, "tokens_per_s", "control_share")
        times = middle["tokens_per_s"] / medians(found["offline"])["tokens_per_s"]
        stalls = {f"longest_{key}_ms": max(one.get(f"longest_{key}_ms", 0.0) for one in turns) for key in STALLS}
        bench.row("turns", how=name, **middle, least=min(speeds), most=max(speeds), times_offline=times, **stalls)
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
