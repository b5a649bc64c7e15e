"""Measures what the prefix cache brings and costs: `python -m benchmarks.prefix_cache`.

Two engines serve the same requests by turns on the same cores, one with `cache.prefix_caching=false`. In `alike` all
prompts begin with the same tokens (`--prefix`, then `--own`); in `turns` each is a conversation of four turns, where a
prompt holds all that came before; in `different` no two begin alike. Prints medians of the seconds, their ratio turn by
turn, the share of the prompt tokens that was found, and the median time to the first token; and fails if any output
differs. Overrides of both engines go behind the options, as `model=llama-160m`. About three minutes on 2 cores.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gapless import LLM, SamplingParams
from gapless.conf.schema import GenerateConfig
from gapless.launch.compose import compose_one

from .support.harness import Benchmark, by_turns, spread

TURNS = 4


def prompts_of(kind: str, count: int, prefix: int, own: int, vocab_size: int) -> list[list[list[int]]]:
    """Make rounds of prompts; those of a round are served at once. Later turns of a conversation come as it goes."""
    draw = random.Random(kind)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(length)]

    alike = tokens(prefix)
    return {
        "alike": [[[*alike, *tokens(own)] for _ in range(count)]],
        "turns": [[tokens(own) for _ in range(count)] for _ in range(TURNS)],
        "different": [[tokens(prefix + own) for _ in range(count)]],
    }[kind]


def run(llm: LLM, rounds: Sequence[Sequence[list[int]]], params: SamplingParams) -> dict[str, Any]:
    """Serve the rounds one after the other; each prompt follows the prompt and the output that it had before."""
    llm.reset()
    past: list[list[int]] = [[] for _ in rounds[0]]
    outputs: list[list[int]] = []
    began = time.perf_counter()
    for prompts in rounds:
        found = llm.generate([[*before, *prompt] for before, prompt in zip(past, prompts, strict=True)], params)
        past = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in found]
        outputs += [each.outputs[0].token_ids for each in found]
    seconds, requests = time.perf_counter() - began, llm.record.requests
    share = sum(r.cached_tokens for r in requests) / sum(r.prompt_tokens for r in requests)
    ttft = 1e3 * statistics.median(r.token_times[0] - r.arrival for r in requests)
    return {"seconds": seconds, "outputs": outputs, "share": share, "ttft_ms": ttft}


def main() -> int:
    bench = Benchmark(__doc__, rounds=3, requests=16, prefix=512, own=64, output=16, overrides=True)
    given = bench.given
    params = SamplingParams(max_tokens=given.output, ignore_eos=True)
    config = compose_one([*(given.overrides or ["model=llama-160m"]), "prompt=x"], GenerateConfig, "generate")
    on, off = (replace(config, cache=replace(config.cache, prefix_caching=is_on)) for is_on in (True, False))
    is_equal = True
    with LLM.from_config(on) as cached, LLM.from_config(off) as plain:
        for kind in ("alike", "turns", "different"):
            rounds = prompts_of(kind, given.requests, given.prefix, given.own, cached.plan.arch.vocab_size)
            engines = {"without": plain, "with": cached}
            for llm in engines.values():
                run(llm, [each[:1] for each in rounds], params)  # warm up
            found = by_turns(given.rounds, {name: partial(run, llm, rounds, params) for name, llm in engines.items()})
            is_equal &= len({str(one["outputs"]) for each in found.values() for one in each}) == 1
            ratios = [a["seconds"] / b["seconds"] for a, b in zip(*found.values(), strict=True)]
            seconds = {f"{name}_s": statistics.median(one["seconds"] for one in of) for name, of in found.items()}
            ttft = {f"ttft_{name}_ms": statistics.median(one["ttft_ms"] for one in of) for name, of in found.items()}
            share = found["with"][0]["share"]
            bench.row("runs", prompts=kind, **seconds, **spread(ratios, "ratio"), found_share=share, **ttft)
    bench.row("outputs", alike=is_equal)
    return bench.end(is_equal)


if __name__ == "__main__":
    sys.exit(main())
