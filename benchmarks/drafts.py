"""Measures what draft tokens bring on the model of the package: `python -m benchmarks.drafts`.

Three workloads run with `scheduler.drafts=0` and with drafts, by turns, on one rank. The prompts of `repetitive` are
lists of lines that differ in a name or a number; those of `plain` are the package's twelve; `random` samples those at a
temperature of 2, so that hardly any guess is right. Each prompt is served alone, and all are served at once. Prints
medians of output tokens/s, the ratio turn by turn, draft tokens, and accepted tokens a decode; and fails if any output
differs. About three minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

from gapless import LLM, SamplingParams
from gapless.conf.policies import SchedulerConfig

from .support.results import ROOT, add_json_option, write_json

WORDS = ("name", "path", "size", "mode", "owner", "group", "index", "value")
REPETITIVE = [
    *("".join(f"        self.{word}_{n} = {word}_{n}\n" for n in range(1, 9)) for word in WORDS[:4]),
    *("".join(f'    "{word}_{n}": {n},\n' for n in range(1, 12)) for word in WORDS[4:]),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=int, default=96, help="output tokens of a request")
    add_json_option(parser)
    arguments = parser.parse_args()
    plain = [json.loads(line)["prompt"] for line in (ROOT / "conf/shipped_prompts.jsonl").read_text().splitlines()]
    greedy = SamplingParams(max_tokens=arguments.output, ignore_eos=True)
    hot = replace(greedy, temperature=2.0, seed=1)
    rows: list[dict[str, Any]] = []
    is_equal = True
    with LLM("shipped", **{"parallel.threads": arguments.threads}) as llm:
        without, drafted = (replace(llm.config.scheduler, drafts=drafts) for drafts in (0, arguments.drafts))
        print(f"{'':24}{'without':>9}{'drafts':>9}{'ratio':>8}  [least .. most]  drafted  accepted a decode")
        for name, prompts, params in (
            ("repetitive", REPETITIVE, greedy), ("plain", plain, greedy), ("random", plain, hot),
        ):  # fmt: skip
            for at_once in (1, len(prompts)):
                run(llm, without, prompts[:1], 1, params)  # warm up
                found: dict[SchedulerConfig, list[dict[str, Any]]] = {without: [], drafted: []}
                for turn in range(arguments.rounds):
                    for policy in (without, drafted) if turn % 2 == 0 else (drafted, without):
                        found[policy].append(run(llm, policy, prompts, at_once, params))
                is_equal &= all(a["tokens"] == b["tokens"] for a, b in zip(*found.values(), strict=True))
                rates = {policy: [one["tokens_per_s"] for one in each] for policy, each in found.items()}
                ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
                last = found[drafted][-1]
                row = {
                    "workload": name, "at_once": at_once, "without_tokens_per_s": statistics.median(rates[without]),
                    "drafts_tokens_per_s": statistics.median(rates[drafted]), "ratio": statistics.median(ratios),
                    "least_ratio": min(ratios), "most_ratio": max(ratios), "draft_tokens": last["drafts"],
                    "accepted_per_decode": last["accepted"] / last["decodes"],
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{f'{name}, {at_once} at once':24}{row['without_tokens_per_s']:9.1f}"
                    f"{row['drafts_tokens_per_s']:9.1f}{row['ratio']:8.3f}  [{min(ratios):.2f} .. {max(ratios):.2f}]"
                    f"{row['draft_tokens']:13}{row['accepted_per_decode']:19.2f}",
                    flush=True,
                )
    write_json(arguments.json, "drafts", {"runs": rows})
    if not is_equal:
        print("an output differs", file=sys.stderr)
    return 0 if is_equal else 1


def run(llm: LLM, policy: SchedulerConfig, prompts: list[str], at_once: int, params: SamplingParams) -> dict[str, Any]:
    """Serve the prompts, `at_once` of them at a time; return tokens, output tokens/s and the counts of drafts."""
    llm.reset(policy)
    begin = time.perf_counter()
    tokens = [
        output.outputs[0].token_ids
        for first in range(0, len(prompts), at_once)
        for output in llm.generate(prompts[first : first + at_once], params)
    ]
    seconds = time.perf_counter() - begin
    micro_batches = llm.record.micro_batches
    drafts = sum(m.drafts for m in micro_batches)
    return {
        "tokens": tokens, "tokens_per_s": sum(map(len, tokens)) / seconds, "drafts": drafts,
        "accepted": sum(m.accepted for m in micro_batches),
        "decodes": sum(m.decode_tokens for m in micro_batches) - drafts,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
