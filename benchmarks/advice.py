"""Takes the advice of `gapless explain` for real and compares it with what was foretold: `python -m benchmarks.advice`.

A LLaMA of about 160M parameters serves requests of 256 to 1,024 tokens over two pipeline stages of one thread each
(`support/real_pipeline.py`), in settings that are bad each in its own way. Each is run, and explained from its run
folder alone (`--seconds`). Then it and its three best advices take turns. A try is one change in one round: the share
that it saved of the metric that the explanation ranks by, beside the run of that round as it was.

Prints for each advice the range that was foretold, what was measured (the median of the rounds), and how many tries lie
within the range; 9 of 10 should. Further arguments are overrides of `gapless bench`. About half an hour on 2 cores that
do nothing else; --settings, --requests and --rounds shorten it. `--report` only reports on the runs in --out.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from gapless.runtime.explain.explain_json import read_explanation

from .support.harness import Benchmark, run_gapless, words
from .support.real_pipeline import SETTING, summary

BAD = {  # what each setting does wrong
    "small chunk": "scheduler.chunk=16",
    "uneven layers": "scheduler.chunk=128 parallel.layers=[9,3]",
    "whole prompts": "scheduler=orca_best workload.pd_ratio=20",
    "depth of one": "scheduler.chunk=128 parallel.depth=1",
    "late tokens": "scheduler=prefill_first workload.request_rate=1",
}
ADVICES = 3


def main() -> int:
    bench = Benchmark(
        __doc__,
        overrides=True,
        settings=list(BAD),
        requests=24,
        rounds=3,
        seconds=60.0,
        out=Path("runs/advice"),
        report=False,
    )
    given = bench.given
    if unknown := set(given.settings) - set(BAD):
        bench.parser.error(f"--settings: {', '.join(sorted(unknown))}: unknown; there are {', '.join(BAD)}")
    for name in given.settings:
        base = words(SETTING, BAD[name], f"workload.num_prompts={given.requests}", *given.overrides)
        _advise(bench, name, given.out / name.replace(" ", "_"), base)
    rows = bench.tables.get("advices", [])
    within, tries = (sum(row[key] for row in rows) for key in ("within", "tries"))
    good = sum(row["low_share"] <= row["measured_share"] <= row["high_share"] for row in rows)
    share = within / tries if tries else 0.0
    bench.row("hits", tries=tries, within=within, within_share=share, advices=len(rows), medians=good)
    return bench.end()


def _advise(bench: Benchmark, name: str, folder: Path, base: Sequence[str]) -> None:
    """Run a setting, explain it, and run it and its advices by turns; report on it."""
    given, explained = bench.given, folder / "explained"
    if not given.report:
        run_gapless("bench", *base, f"hydra.run.dir={explained}")
        run_gapless("explain", str(explained), f"seconds={given.seconds:g}")
    explanation = read_explanation(explained)
    if explanation is None:
        raise SystemExit(f"{explained}: not explained")
    advised = [outcome for outcome in explanation.outcomes if outcome.command is not None][:ADVICES]
    commands = [["bench", *base], *(shlex.split(outcome.command or "")[1:] for outcome in advised)]
    turns = [[folder / f"round{number}_{place}" for place in range(len(commands))] for number in range(given.rounds)]
    for turn in () if given.report else turns:
        for command, into in zip(commands, turn, strict=True):
            run_gapless(*command, f"hydra.run.dir={into}")
    bench.row("twins", setting=name, **{f"{metric}_share": value for metric, value in explanation.error.items()})
    metric = explanation.metric
    for place, outcome in enumerate(advised, 1):
        saved = [1 - summary(turn[place])[metric] / summary(turn[0])[metric] for turn in turns]
        foretold = outcome.saves[metric]
        shares = {"foretold_share": foretold.middle, "low_share": foretold.low, "high_share": foretold.high}
        within = sum(foretold.low <= share <= foretold.high for share in saved)
        measured = {"measured_share": statistics.median(saved), "tries": given.rounds, "within": within}
        bench.row("advices", setting=name, metric=metric, change=outcome.change, **shares, **measured)


if __name__ == "__main__":
    sys.exit(main())
