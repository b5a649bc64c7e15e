"""Measures what draft tokens bring on the model of the package: `python -m benchmarks.drafts`.

Three workloads run with `scheduler.drafts=0` and with drafts, by turns, on one rank. The prompts of `repetitive` are
lists of lines that differ in a name or a number; those of `plain` are the package's twelve; `random` samples those at a
temperature of 2, so that hardly any guess is right. Each prompt is served alone, and all are served at once. Prints
medians of output tokens/s, the ratio turn by turn, draft tokens, and accepted tokens a decode; and fails if any output
differs. About three minutes on 2 cores.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

from gapless import LLM, SamplingParams
from gapless.conf.policies import SchedulerConfig

from .support.harness import Benchmark, by_turns, spread
from .support.results import ROOT

WORDS = ("name", "path", "size", "mode", "owner", "group", "index", "value")
REPETITIVE = [
    *("".join(f"        self.{word}_{n} = {word}_{n}\n" for n in range(1, 9)) for word in WORDS[:4]),
    *("".join(f'    "{word}_{n}": {n},\n' for n in range(1, 12)) for word in WORDS[4:]),
]


def main() -> int:
    bench = Benchmark(__doc__, rounds=5, drafts=8, threads=2, output=96)
    given = bench.given
    plain = [json.loads(line)["prompt"] for line in (ROOT / "conf/shipped_prompts.jsonl").read_text().splitlines()]
    greedy = SamplingParams(max_tokens=given.output, ignore_eos=True)
    workloads = {
        "repetitive": (REPETITIVE, greedy),
        "plain": (plain, greedy),
        "random": (plain, replace(greedy, temperature=2.0, seed=1)),
    }
    is_equal = True
    with LLM("shipped", **{"parallel.threads": given.threads}) as llm:
        policies = {n: replace(llm.config.scheduler, drafts=n) for n in (0, given.drafts)}
        for name, (prompts, params) in workloads.items():
            for at_once in (1, len(prompts)):
                run(llm, policies[0], prompts[:1], 1, params)  # warm up
                variants = {n: partial(run, llm, policy, prompts, at_once, params) for n, policy in policies.items()}
                without, drafted = by_turns(given.rounds, variants).values()
                is_equal &= all(a["tokens"] == b["tokens"] for a, b in zip(without, drafted, strict=True))
                ratios = [b["tokens_per_s"] / a["tokens_per_s"] for a, b in zip(without, drafted, strict=True)]
                rates = [statistics.median(one["tokens_per_s"] for one in each) for each in (without, drafted)]
                speeds = dict(zip(("without_tokens_per_s", "drafts_tokens_per_s"), rates, strict=True))
                used = {key: drafted[-1][key] for key in ("draft_tokens", "accepted_per_decode")}
                bench.row("runs", workload=name, at_once=at_once, **speeds, **spread(ratios, "ratio"), **used)
    bench.row("outputs", alike=is_equal)
    return bench.end(is_equal)


def run(llm: LLM, policy: SchedulerConfig, prompts: list[str], at_once: int, params: SamplingParams) -> dict[str, Any]:
    """Serve the prompts, `at_once` of them at a time; return tokens, output tokens/s and the counts of drafts."""
    llm.reset(policy)
    begin = time.perf_counter()
    tokens = [
        output.outputs[0].token_ids
        for first in range(0, len(prompts), at_once)
        for output in llm.generate(prompts[first : first + at_once], params)
    ]
    rate = sum(map(len, tokens)) / (time.perf_counter() - begin)
    drafts, accepted, decodes = (
        sum(getattr(each, of) for each in llm.record.micro_batches) for of in ("drafts", "accepted", "decode_tokens")
    )
    each = accepted / (decodes - drafts)
    return {"tokens": tokens, "tokens_per_s": rate, "draft_tokens": drafts, "accepted_per_decode": each}


if __name__ == "__main__":
    sys.exit(main())
