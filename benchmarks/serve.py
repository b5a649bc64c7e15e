"""Measures what HTTP costs the pipeline: `python -m benchmarks.serve`.

The model of the package, which hardly computes, continues as many prompts as there are clients: offline by `LLM`, and
over `gapless serve` to clients that each read a stream with an event a token. They take turns on the same cores; the
clients share them too. Prints output tokens/s, `control` as a share of stage time, and the worst delay of the front's
event loop. Words after the options are overrides of both, as `parallel=pp2`. About a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import ServeConfig
from gapless.launch import compose
from gapless.runtime import LLM
from gapless.runtime.ledger.causes import Cause
from gapless.runtime.ledger.ledger import Ledger

from .support.results import add_json_option, write_json
from .support.server import Server, gapless_server

PROMPT = "import os\n"
CONTROL = Cause.CONTROL.value


def offline(llm: LLM, clients: int, tokens: int) -> dict[str, float]:
    llm.reset()
    began = time.perf_counter()
    llm.generate([PROMPT] * clients, SamplingParams(max_tokens=tokens, ignore_eos=True))
    seconds = time.perf_counter() - began
    ledger = Ledger(llm.record)
    control = ledger.seconds_by_cause()[Cause.CONTROL] / ledger.stage_seconds
    return {"tokens_per_s": clients * tokens / seconds, "control_share": control}


def counters(server: Server) -> dict[str, float]:
    """The number of stages; the `control` seconds of all, and the front's worst delays so far."""
    text = server.get("/metrics")
    idle = re.findall(r"^gapless:stage_idle_seconds_total\{(.*)\} (\S+)$", text, re.MULTILINE)
    return {
        "stages": len(re.findall(r"^gapless:stage_busy_seconds_total", text, re.MULTILINE)),
        "control_s": sum(float(seconds) for labels, seconds in idle if f'"{CONTROL}"' in labels),
        "stall_s": float(re.findall(r"^gapless:front_longest_stall_seconds (\S+)$", text, re.MULTILINE)[0]),
        "own_stall_s": float(re.findall(r"^gapless:front_longest_own_stall_seconds (\S+)$", text, re.MULTILINE)[0]),
    }


def served(server: Server, clients: int, tokens: int) -> dict[str, float]:
    before = counters(server)
    began = time.perf_counter()
    events = asyncio.run(_streams(server, clients, tokens))
    seconds = time.perf_counter() - began
    assert events == [tokens] * clients, events
    time.sleep(0.5)  # the ledger counts several times a second
    after = counters(server)
    control = (after["control_s"] - before["control_s"]) / (seconds * after["stages"])
    return {
        "tokens_per_s": clients * tokens / seconds, "control_share": control, "longest_stall_s": after["stall_s"],
        "longest_own_stall_s": after["own_stall_s"],
    }  # fmt: skip


async def _streams(server: Server, clients: int, tokens: int) -> list[int]:
    return list(await asyncio.gather(*(_stream(server, tokens) for _ in range(clients))))


async def _stream(server: Server, tokens: int) -> int:
    """Read one stream to its end; return its events."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    text = await reader.read(-1)
    writer.close()
    return text.count(b"data: {")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    rewritten = compose.rewrite(overrides, ServeConfig, "serve")
    (config,) = compose.compose_all(rewritten, ServeConfig, "serve", multirun=False)
    found: dict[str, list[dict[str, float]]] = {"offline": [], "served": []}
    with LLM.from_config(config) as llm, gapless_server(overrides) as server:
        offline(llm, arguments.clients, 8)
        served(server, arguments.clients, 8)
        for _ in range(arguments.rounds):
            found["offline"].append(offline(llm, arguments.clients, arguments.tokens))
            found["served"].append(served(server, arguments.clients, arguments.tokens))
    rows: list[dict[str, Any]] = []
    print(f"{arguments.clients} streams of {arguments.tokens} tokens")
    print("            tok/s    least     most  control  x offline  longest stall  of its own")
    base = statistics.median(one["tokens_per_s"] for one in found["offline"])
    for name, turns in found.items():
        speeds = [one["tokens_per_s"] for one in turns]
        stall, own = (max(one.get(f"longest_{whose}s", 0.0) for one in turns) for whose in ("stall_", "own_stall_"))
        row = {
            "how": name, "tokens_per_s": statistics.median(speeds), "least": min(speeds), "most": max(speeds),
            "control_share": statistics.median(one["control_share"] for one in turns),
            "times_offline": statistics.median(speeds) / base, "longest_stall_ms": 1e3 * stall,
            "longest_own_stall_ms": 1e3 * own,
        }  # fmt: skip
        rows.append(row)
        print(
            f"{name:<8}{row['tokens_per_s']:9.1f}{row['least']:9.1f}{row['most']:9.1f}{row['control_share']:9.1%}"
            f"{row['times_offline']:11.2f}" + (f"{1e3 * stall:12.1f} ms{1e3 * own:9.1f} ms" if stall else "")
        )
    write_json(arguments.json, Path(__file__).stem, {"turns": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
