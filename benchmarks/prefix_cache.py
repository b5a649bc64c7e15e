"""Measures what the prefix cache brings and costs: `python -m benchmarks.prefix_cache`.

Two engines serve the same requests by turns on the same cores, one with `cache.prefix_caching=false`. In `alike` all
prompts begin with the same tokens; in `turns` each is a conversation of four turns, where a prompt holds all that came
before; in `different` no two begin alike. Prints medians of the seconds, their ratio turn by turn, the share of the
prompt tokens that was found, and the median time to the first token; and fails if any output differs. Words after the
options are overrides of both engines, as `model=llama-160m`. About three minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gapless import LLM, SamplingParams
from gapless.conf.schema import GenerateConfig
from gapless.launch import compose

from .support.results import add_json_option, write_json

TURNS = 4


def prompts_of(kind: str, count: int, prefix: int, own: int, vocab_size: int) -> list[list[list[int]]]:
    """Rounds of prompts; those of a round are served at once. Later turns of a conversation are made as it goes."""
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
    seconds = time.perf_counter() - began
    requests = llm.record.requests
    return {
        "seconds": seconds, "outputs": outputs,
        "share": sum(r.cached_tokens for r in requests) / sum(r.prompt_tokens for r in requests),
        "ttft_ms": 1e3 * statistics.median(r.token_times[0] - r.arrival for r in requests),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=512, help="tokens that prompts begin with alike")
    parser.add_argument("--own", type=int, default=64, help="further tokens of a prompt, or those of a turn")
    parser.add_argument("--output", type=int, default=16, help="output tokens of a request")
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    words = compose.rewrite([*(overrides or ["model=llama-160m"]), "prompt=x"], GenerateConfig, "generate")
    params = SamplingParams(max_tokens=arguments.output, ignore_eos=True)
    rows: list[dict[str, Any]] = []
    is_equal = True
    (config,) = compose.compose_all(words, GenerateConfig, "generate", multirun=False)
    on, off = (replace(config, cache=replace(config.cache, prefix_caching=is_on)) for is_on in (True, False))
    with LLM.from_config(on) as cached, LLM.from_config(off) as plain:
        print("prompts      without s     with s    ratio  [least .. most]   found  TTFT without      with")
        for kind in ("alike", "turns", "different"):
            rounds = prompts_of(kind, arguments.requests, arguments.prefix, arguments.own, cached.plan.arch.vocab_size)
            found: dict[LLM, list[dict[str, Any]]] = {plain: [], cached: []}
            for llm in found:
                run(llm, [each[:1] for each in rounds], params)  # warm up
            for turn in range(arguments.rounds):
                for llm in (plain, cached) if turn % 2 == 0 else (cached, plain):
                    found[llm].append(run(llm, rounds, params))
            is_equal &= len({str(one["outputs"]) for each in found.values() for one in each}) == 1
            ratios = [a["seconds"] / b["seconds"] for a, b in zip(found[plain], found[cached], strict=True)]
            medians = {
                name: [statistics.median(one[name] for one in found[llm]) for llm in (plain, cached)]
                for name in ("seconds", "ttft_ms")
            }
            row = {
                "prompts": kind, "without_s": medians["seconds"][0], "with_s": medians["seconds"][1],
                "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
                "found": found[cached][0]["share"], "ttft_without_ms": medians["ttft_ms"][0],
                "ttft_with_ms": medians["ttft_ms"][1],
            }  # fmt: skip
            rows.append(row)
            print(
                f"{kind:<12}{row['without_s']:10.2f}{row['with_s']:11.2f}{row['ratio']:9.2f}"
                f"  [{row['least']:.2f} .. {row['most']:.2f}]{row['found']:9.1%}"
                f"{row['ttft_without_ms']:11.0f} ms{row['ttft_with_ms']:7.0f} ms",
                flush=True,
            )
    write_json(arguments.json, "prefix_cache", {"runs": rows})
    if not is_equal:
        print("an output differs", file=sys.stderr)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
