"""Takes the advice of `gapless explain` for real and compares it with what was foretold: `python -m benchmarks.advice`.

A LLaMA of about 160M parameters serves requests of 256 to 1,024 tokens over two pipeline stages of one thread each
(`support/real_pipeline.py`), in settings that are bad each in its own way. Each is run, and explained from its run
folder alone. Then it and its three best advices take turns. A try is one change in one round: the share that it saved
of the metric that the explanation ranks by, beside the run of that round as it was.

Prints for each advice the range that was foretold, what was measured (the median of the rounds), and how many tries lie
within the range; 9 of 10 should. Further arguments are overrides of `gapless bench`. About half an hour on 2 cores that
do nothing else; --settings, --requests and --rounds shorten it.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gapless.conf.errors import ConfigError
from gapless.launch.cli import main as gapless
from gapless.runtime.ledger.explanation import Explanation, Outcome
from gapless.runtime.run_folder.explain_json import read_explanation

from .support.real_pipeline import SETTING, summary
from .support.results import add_json_option, write_json

BAD = {  # what each setting does wrong
    "small chunk": ("scheduler.chunk=16",),
    "uneven layers": ("scheduler.chunk=128", "parallel.layers=[9,3]"),
    "whole prompts": ("scheduler=orca_best", "workload.pd_ratio=20"),
    "depth of one": ("scheduler.chunk=128", "parallel.depth=1"),
    "late tokens": ("scheduler=prefill_first", "workload.request_rate=1"),
}
ADVICES = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", default=",".join(BAD), help="which of the bad settings")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each explanation")
    parser.add_argument("--out", type=Path, default=Path("runs/advice"))
    parser.add_argument("--report", action="store_true", help="only report on the runs in --out")
    add_json_option(parser)
    arguments, overrides = parser.parse_known_args()
    names = arguments.settings.split(",")
    if unknown := set(names) - set(BAD):
        raise SystemExit(f"--settings: {', '.join(sorted(unknown))}: unknown; there are {', '.join(BAD)}")
    if not arguments.report:
        for name in names:
            keys = [f"workload.num_prompts={arguments.requests}", *overrides]
            _run_setting(arguments.out / name.replace(" ", "_"), BAD[name], keys, arguments.rounds, arguments.seconds)
    report(arguments.out, names, arguments.rounds, arguments.json)
    return 0


def _run_setting(folder: Path, bad: Sequence[str], overrides: Sequence[str], rounds: int, seconds: float) -> None:
    """Run a setting, explain it, and run it and its advices by turns."""
    base = [*SETTING, *bad, *overrides]
    _gapless(["bench", *base, f"hydra.run.dir={folder / 'explained'}"])
    _gapless(["explain", str(folder / "explained"), f"seconds={seconds:g}"])
    advised = _advised(folder)
    for number in range(rounds):
        _gapless(["bench", *base, f"hydra.run.dir={_turn(folder, 0, number)}"])
        for place, outcome in enumerate(advised, 1):
            assert outcome.command is not None
            _, *words = shlex.split(outcome.command)
            _gapless([*words, f"hydra.run.dir={_turn(folder, place, number)}"])


def _gapless(command: list[str]) -> None:
    if code := gapless(command):
        raise ConfigError(f"gapless {' '.join(command)} ended with {code}")


def _turn(folder: Path, place: int, number: int) -> Path:
    """The run folder of a turn: of the setting itself (place 0) or of an advice."""
    return folder / f"round{number}_{place}"


def _explanation(folder: Path) -> Explanation:
    explanation = read_explanation(folder / "explained")
    if explanation is None:
        raise ConfigError(f"{folder / 'explained'}: not explained")
    return explanation


def _advised(folder: Path) -> list[Outcome]:
    """The first outcomes of a setting's explanation that a command makes."""
    return [outcome for outcome in _explanation(folder).outcomes if outcome.command is not None][:ADVICES]


def report(out: Path, names: Sequence[str], rounds: int, json_file: Path | None) -> None:
    """Print what the runs in `out` came to."""
    twins: list[dict[str, Any]] = []
    advices: list[dict[str, Any]] = []
    print("\nreplays of the runs as they were, off by      duration   p99 TBT  p99 TTFT")
    for name in names:
        error = _explanation(out / name.replace(" ", "_")).error
        row = {"setting": name} | {f"{metric}_share": value for metric, value in error.items()}
        twins.append(row)
        print(f"  {name:<42} {' '.join(f'{value:+9.1%}' for value in error.values())}")
    print("\nadvices: saved of                             foretold (range)         measured  tries within")
    for name in names:
        advices += _compare(out / name.replace(" ", "_"), name, rounds)
    within, tries = (sum(row[key] for row in advices) for key in ("within", "tries"))
    medians = sum(row["low_share"] <= row["measured_share"] <= row["high_share"] for row in advices)
    share = within / tries if tries else 0.0
    print(f"\n{within} of {tries} tries ({share:.1%}) and {medians} of {len(advices)} medians lie within the range")
    total = {"tries": tries, "within": within, "within_share": share, "advices": len(advices), "medians": medians}
    write_json(json_file, "advice", {"twins": twins, "advices": advices, "hits": [total]})


def _compare(folder: Path, name: str, rounds: int) -> list[dict[str, Any]]:
    metric, rows = _explanation(folder).metric, []
    for place, outcome in enumerate(_advised(folder), 1):
        saved = []
        for number in range(rounds):
            before, after = (summary(_turn(folder, each, number))[metric] for each in (0, place))
            saved.append(1 - after / before)
        foretold = outcome.saves[metric]
        row = {
            "setting": name, "metric": metric, "change": outcome.change,
            "foretold_share": foretold.middle, "low_share": foretold.low, "high_share": foretold.high,
            "measured_share": statistics.median(saved), "tries": rounds,
            "within": sum(foretold.low <= share <= foretold.high for share in saved),
        }  # fmt: skip
        rows.append(row)
        print(
            f"  {name}, {metric}: {outcome.change}\n{'':44} {foretold.middle:+7.1%} ({foretold.low:+.1%} to "
            f"{foretold.high:+.1%}) {row['measured_share']:+8.1%}  {row['within']} of {rounds}"
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
