"""Compares `gapless serve` with vLLM's CPU server under the same load: `python -m benchmarks.against_vllm_server`.

`--vllm` is the Python of an environment with vLLM's CPU build. Both serve the package's model in float32 on all cores,
otherwise with their own defaults; one server runs at a time, and the clients share the cores. First all requests arrive
at once, which measures a server's saturation throughput. Then the same requests arrive at each server with the same
Poisson arrival times, at 50, 80 and 100% of the lower saturation. No prompt repeats, so prefix caches never hit.
Latencies count from a request's scheduled arrival. A request meets the SLO if its first token arrives within
`--ttft-ms` and each further one within `--tbt-ms` of the previous one; goodput is the throughput of such requests.

`same` is the share of outputs that equal the other server's. Overrides of `gapless serve` follow the options, e.g.
`scheduler=equal_time`. Three rounds take 15 minutes on 2 cores.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

import gapless.models

from .peer import vllm_environment
from .support.harness import Benchmark, by_turns, medians
from .support.server import Server, await_line, gapless_server, logged
from .support.streams import Stream, stream_all

SHARES = (0.5, 0.8, 1.0)
_SHIPPED = Path(gapless.models.__path__[0]) / "shipped"
_VOCABULARY: int = json.loads((_SHIPPED / "config.json").read_text())["vocab_size"]


@contextmanager
def vllm_server(python: Path) -> Iterator[Server]:
    """Start vLLM's server with the package's model, and yield once it accepts requests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = f"vllm.entrypoints.openai.api_server --model {_SHIPPED} --dtype float32 --host 127.0.0.1 --port {port}"
    command = [str(python), "-m", *server.split()]
    environment = vllm_environment([f"0-{(os.cpu_count() or 1) - 1}"]) | {"VLLM_NO_USAGE_STATS": "1"}
    with logged(command, environment | os.environ) as (process, log):
        await_line(process, log, r"Application startup complete")
        yield Server("127.0.0.1", port, process)


class Load:
    """Requests of equal lengths and their arrival times.

    Args:
        count: number of requests.
        prompt, output: tokens per request.
    """

    def __init__(self, count: int, prompt: int, output: int) -> None:
        self._shape = count, prompt
        self._output = output

    def run(self, server: Server, when: str, rate: float | None) -> list[Stream]:
        """Send all requests, at once or at `rate` per second on average, and return their streams.

        `when`, the name of the load, seeds the prompts. The arrival times of different rates differ only in scale.

        Raises:
            SystemExit: a request failed.
        """
        prompts = np.random.default_rng(list(when.encode())).integers(5, _VOCABULARY, self._shape).tolist()
        gaps = np.random.default_rng(0).exponential(size=len(prompts))
        due = gaps.cumsum() / gaps.mean() / (rate or math.inf)
        streams = stream_all(server, prompts, self._output, due.tolist())
        if failed := [stream.error for stream in streams if stream.error]:
            raise SystemExit(f"{len(failed)} of {len(streams)} requests failed; the first: {failed[0][:500]}")
        return streams


def seconds_of(streams: Sequence[Stream]) -> float:
    """Return the seconds from the first scheduled arrival to the last token."""
    return max(stream.token_times[-1] for stream in streams) - streams[0].due


def measure(streams: Sequence[Stream], ttft_ms: float, tbt_ms: float) -> dict[str, float]:
    """Return the throughput and latencies of one run."""
    seconds = seconds_of(streams)
    good = sum(1e3 * stream.ttft <= ttft_ms and 1e3 * max(stream.gaps, default=0.0) <= tbt_ms for stream in streams)
    ttft = np.percentile([1e3 * stream.ttft for stream in streams], [50, 99])
    tbt = np.percentile([1e3 * gap for stream in streams for gap in stream.gaps], [50, 99])
    return {
        "requests_per_s": len(streams) / seconds,
        "goodput_per_s": good / seconds,
        "good_share": good / len(streams),
        "p50_ttft_ms": float(ttft[0]),
        "p99_ttft_ms": float(ttft[1]),
        "p50_tbt_ms": float(tbt[0]),
        "p99_tbt_ms": float(tbt[1]),
        "output_tokens_per_s": sum(len(s.token_ids) for s in streams) / seconds,
    }


def same_share(streams: Sequence[Stream], others: Sequence[Stream]) -> float:
    """Return the share of equal outputs."""
    return statistics.fmean(one.token_ids == other.token_ids for one, other in zip(streams, others, strict=True))


def main() -> int:
    python = {"type": Path, "metavar": "PYTHON", "required": True}
    bench = Benchmark(
        __doc__,
        overrides=True,
        vllm=python,
        requests=300,
        prompt=64,
        output=48,
        rounds=3,
        ttft_ms=500.0,
        tbt_ms=50.0,
    )
    given = bench.given
    load = Load(given.requests, given.prompt, given.output)
    starts = {"gapless": partial(gapless_server, given.overrides), "vllm": partial(vllm_server, given.vllm)}

    def run(name: str, rates: dict[str, float | None]) -> dict[str, list[Stream]]:
        with starts[name]() as server:
            load.run(server, "warm-up", None)
            return {when: load.run(server, when, rate) for when, rate in rates.items()}

    def all_turns(rates: dict[str, float | None]) -> dict[tuple[str, str], list[list[Stream]]]:
        found = by_turns(given.rounds, {name: partial(run, name, rates) for name in starts})
        return {(when, name): [turn[when] for turn in found[name]] for when in rates for name in starts}

    turns = all_turns({"at once": None})
    for (_, name), found in turns.items():
        rate = statistics.median(given.requests / seconds_of(streams) for streams in found)
        bench.row("saturation", server=name, requests_per_s=rate)
    lower = min(row["requests_per_s"] for row in bench.tables["saturation"])
    turns |= all_turns({f"{share:.0%}": share * lower for share in SHARES})
    for (when, name), found in turns.items():
        each = [measure(streams, given.ttft_ms, given.tbt_ms) for streams in found]
        others = turns[when, "vllm" if name == "gapless" else "gapless"]
        speeds = [one["output_tokens_per_s"] for one in each]
        same = same_share(found[0], others[0])
        bench.row(
            "loads", load=when, server=name, **medians(each), least=min(speeds), most=max(speeds), same_share=same
        )
    bench.row("slo", requests=given.requests, ttft_ms=given.ttft_ms, tbt_ms=given.tbt_ms)
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
