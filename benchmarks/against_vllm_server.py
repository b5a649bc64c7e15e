"""Serves the same load by gapless and by vLLM's CPU server, by turns: `python -m benchmarks.against_vllm_server`.

`--vllm` is the Python of an environment with vLLM's CPU build. Both serve the model of the package in float32 on all
cores, and otherwise by their own defaults; one of them runs at a time, and the clients share the cores. First, all
requests come at once: what a server then ends a second is its saturation. Then the same requests come at the same
random times (Poisson) to each, at 50, 80 and 100% of the lower saturation. No prompt comes twice to a server, so that
no prefix is found in a cache. A time is from when a request was due. A request meets the SLO if its first token came
within `--ttft-ms`, and each further one within `--tbt-ms` of the one before; goodput is how many of those end a second.

`same` is the share of the outputs whose tokens are those of the other server. Words after the options are overrides of
`gapless serve`, as `scheduler=equal_time`. A quarter of an hour for three rounds on 2 cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import socket
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import gapless.models

from .support.results import add_json_option, write_json
from .support.server import Server, await_line, gapless_server, logged
from .support.streams import Stream, stream_all

SHARES = (0.5, 0.8, 1.0)
_SHIPPED = Path(gapless.models.__path__[0]) / "shipped"
_VOCABULARY: int = json.loads((_SHIPPED / "config.json").read_text())["vocab_size"]


@contextmanager
def vllm_server(python: Path) -> Iterator[Server]:
    """Start vLLM's server on the package's model; yield it once it takes requests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(_SHIPPED), "--dtype", "float32",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    with logged(words, {name: os.environ.get(name, value) for name, value in defaults.items()}) as (process, log):
        await_line(process, log, r"Application startup complete")
        yield Server("127.0.0.1", port, process)


class Load:
    """Requests of one shape, and when they come.

    Args:
        count: requests.
        prompt, output: tokens of each.
    """

    def __init__(self, count: int, prompt: int, output: int) -> None:
        self._shape = count, prompt
        self._output = output

    def run(self, server: Server, when: str, rate: float | None) -> list[Stream]:
        """Send all requests, at once or at `rate` a second on average, and return their streams.

        Prompts follow from `when`, the name of the turn. The times of all rates are alike, but for their scale.

        Raises:
            SystemExit: one failed.
        """
        prompts = np.random.default_rng(list(when.encode())).integers(5, _VOCABULARY, self._shape).tolist()
        gaps = np.random.default_rng(0).exponential(size=len(prompts))
        due = gaps.cumsum() / gaps.mean() / (rate or math.inf)
        streams = stream_all(server, prompts, self._output, due.tolist())
        if failed := [stream.error for stream in streams if stream.error]:
            raise SystemExit(f"{len(failed)} of {len(streams)} requests failed; the first: {failed[0][:500]}")
        return streams


def seconds_of(streams: Sequence[Stream]) -> float:
    """From when the first was due until the last token."""
    return max(stream.token_times[-1] for stream in streams) - streams[0].due


def measure(streams: Sequence[Stream], ttft_ms: float, tbt_ms: float) -> dict[str, float]:
    """Throughput and latencies of one turn."""
    seconds = seconds_of(streams)
    good = sum(1e3 * stream.ttft <= ttft_ms and 1e3 * max(stream.gaps, default=0.0) <= tbt_ms for stream in streams)
    ttft = np.percentile([1e3 * stream.ttft for stream in streams], [50, 99])
    tbt = np.percentile([1e3 * gap for stream in streams for gap in stream.gaps], [50, 99])
    return {
        "requests_per_s": len(streams) / seconds, "goodput_per_s": good / seconds, "good_share": good / len(streams),
        "p50_ttft_ms": float(ttft[0]), "p99_ttft_ms": float(ttft[1]), "p50_tbt_ms": float(tbt[0]),
        "p99_tbt_ms": float(tbt[1]), "output_tokens_per_s": sum(len(s.token_ids) for s in streams) / seconds,
    }  # fmt: skip


def same_share(streams: Sequence[Stream], others: Sequence[Stream]) -> float:
    """The share of the outputs that are alike."""
    return statistics.fmean(one.token_ids == other.token_ids for one, other in zip(streams, others, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", required=True)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=48, help="tokens of an output")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ttft-ms", type=float, default=500.0)
    parser.add_argument("--tbt-ms", type=float, default=50.0)
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    load = Load(arguments.requests, arguments.prompt, arguments.output)
    starts = {"gapless": lambda: gapless_server(overrides), "vllm": lambda: vllm_server(arguments.vllm)}
    turns: dict[tuple[str, str], list[list[Stream]]] = {}

    def take_turns(number: int, rates: dict[str, float | None]) -> None:
        for name in list(starts)[:: 1 if number % 2 == 0 else -1]:
            with starts[name]() as server:
                load.run(server, "warm-up", None)
                for when, rate in rates.items():
                    streams = load.run(server, when, rate)
                    turns.setdefault((when, name), []).append(streams)
                    said = f"round {number + 1}: {when}, {name}: {seconds_of(streams):.1f} s"
                    print(said, file=sys.stderr, flush=True)

    for number in range(arguments.rounds):
        take_turns(number, {"at once": None})
    saturation = {
        name: statistics.median(arguments.requests / seconds_of(streams) for streams in turns["at once", name])
        for name in starts
    }
    lower = min(saturation.values())
    for number in range(arguments.rounds):
        take_turns(number, {f"{share:.0%}": share * lower for share in SHARES})
    rows: list[dict[str, Any]] = []
    print(f"{arguments.requests} requests of {arguments.prompt} + {arguments.output} tokens; the lower saturation is "
          f"{lower:.2f} requests/s; SLO: TTFT {arguments.ttft_ms:g} ms, TBT {arguments.tbt_ms:g} ms")  # fmt: skip
    print(f"{'load':<8}{'server':<9}{'req/s':>8}{'goodput':>9}{'met':>7}{'TTFT p50':>10}{'p99':>9}{'TBT p50':>9}"
          f"{'p99':>8} ms{'tok/s':>9}{'least':>9}{'most':>9}{'same':>7}")  # fmt: skip
    for when, name in itertools.product(dict.fromkeys(when for when, _ in turns), starts):
        found = turns[when, name]
        each = [measure(streams, arguments.ttft_ms, arguments.tbt_ms) for streams in found]
        others = turns[when, "vllm" if name == "gapless" else "gapless"]
        speeds = [one["output_tokens_per_s"] for one in each]
        row: dict[str, Any] = {"load": when, "server": name} | {
            key: statistics.median(one[key] for one in each) for key in each[0]
        }
        row |= {"least": min(speeds), "most": max(speeds), "same_share": same_share(found[0], others[0])}
        rows.append(row)
        print(f"{when:<8}{name:<9}{row['requests_per_s']:>8.2f}{row['goodput_per_s']:>9.2f}{row['good_share']:>7.0%}"
              f"{row['p50_ttft_ms']:>10.1f}{row['p99_ttft_ms']:>9.1f}{row['p50_tbt_ms']:>9.2f}{row['p99_tbt_ms']:>8.2f}"
              f"{row['output_tokens_per_s']:>12.1f}{row['least']:>9.1f}{row['most']:>9.1f}"
              f"{row['same_share']:>7.0%}")  # fmt: skip
    rates = [{"server": name, "requests_per_s": rate} for name, rate in saturation.items()]
    slo = [{"requests": arguments.requests, "ttft_ms": arguments.ttft_ms, "tbt_ms": arguments.tbt_ms}]
    write_json(arguments.json, Path(__file__).stem, {"saturation": rates, "loads": rows, "slo": slo})
    return 0


if __name__ == "__main__":
    sys.exit(main())
