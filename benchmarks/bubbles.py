"""Makes the runs and pictures of `docs/bubbles.md`: `python -m benchmarks.bubbles [pb1 pb2 pb3 all]`.

Each scene is one `gapless bench` of a few requests over two stages, first under a policy that shows a bubble, then
under policies that remove it. Its picture shows the part of the first run that holds most of that bubble, and the
middle of the others. About two minutes a scene on 2 cores; `--draw` only draws existing runs. `all` runs every policy
and prints a table, 8 minutes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gapless.launch.cli import main as gapless
from gapless.runtime.ledger.causes import CAUSES, Cause
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.report.timeline_png import timeline_window, write_timeline
from gapless.runtime.run_folder.read import read_run_folder

IMAGES = Path("docs/images")
COMMON = "model=llama-160m parallel=pp2 parallel.threads=1 cache.num_blocks=2048"


@dataclass(frozen=True, slots=True)
class Scene:
    """A `gapless bench` with `overrides`. The picture shows `seconds` of each run; without a cause there is a table."""

    cause: Cause | None
    overrides: str
    seconds: float | None = None
    all_at_worst: bool = False  # show the part with most of the bubble in every run, not only in the first


SCENES = {
    "pb1": Scene(
        Cause.PB1_PREFILL_SIZE,
        "scheduler=prefill_first,sarathi,equal_time scheduler.max_batched_tokens=1 scheduler.chunk=256 "
        "scheduler.batch=8 workload=fixed workload.input_len=700 workload.range_ratio=0.9 workload.output_len=4 "
        "workload.num_prompts=16",
        6.0,
    ),
    "pb2": Scene(
        Cause.PB2_PREFILL_DECODE,
        "scheduler=orca_best,sarathi,equal_time scheduler.chunk=96 scheduler.batch=8 "
        "workload=fixed workload.input_len=500 workload.output_len=50 workload.range_ratio=0.6 workload.num_prompts=28",
        4.0,
    ),
    "pb3": Scene(
        Cause.PB3_DECODE_CONTEXT,
        "scheduler=request_level,equal_time scheduler.order=shortest_prompt scheduler.chunk=256 scheduler.batch=6 "
        "workload=fixed workload.input_len=900 workload.range_ratio=0.95 workload.output_len=40 "
        "workload.num_prompts=12 parallel.layers=[7,5]",
        1.5,
        all_at_worst=True,
    ),
    "all": Scene(
        None,
        "scheduler=request_level,orca_worst,orca_best,prefill_first,token_throttle,token_budget,sarathi,equal_time "
        "scheduler.batch=4 scheduler.chunk=64 scheduler.budget=64 scheduler.max_batched_tokens=1024 "
        "workload=zipf workload.theta=0 workload.min_len=512 workload.max_len=1024 workload.num_prompts=14",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the scenes of docs/bubbles.md and draw their pictures.")
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"of {', '.join(SCENES)}; all if none is named")
    parser.add_argument("--draw", action="store_true", help="only draw the runs that are there")
    arguments = parser.parse_args()
    draw = arguments.draw
    if unknown := [name for name in arguments.scenes if name not in SCENES]:
        parser.error(f"no scene {unknown[0]}: choose from {', '.join(SCENES)}")
    for name in arguments.scenes or list(SCENES):
        scene, folder = SCENES[name], Path("runs/bubbles") / name
        command = f"bench {COMMON} {scene.overrides} hydra.run.dir={folder}"
        print(f"\n{name}: gapless {command}", flush=True)
        if not draw and (code := gapless(shlex.split(command))):
            return code
        if scene.cause is None or scene.seconds is None:
            print(table(folder))
            continue
        runs = {}
        for path in sorted(p for p in folder.iterdir() if (p / "summary.json").is_file()):
            record = read_run_folder(path).load()
            ledger = Ledger(record)
            at_worst = scene.all_at_worst or not runs
            window = densest(ledger, scene.cause, scene.seconds) if at_worst else central(ledger, scene.seconds)
            runs[path.name[3:]] = timeline_window(ledger, window)
        print(write_timeline(IMAGES / f"{name}.png", runs))
    return 0


def table(folder: Path) -> str:
    """A table in Markdown: each run's idle time by cause as a share of stage time, its throughput and p99 TBT."""
    named = Cause.PB1_PREFILL_SIZE, Cause.PB2_PREFILL_DECODE, Cause.PB3_DECODE_CONTEXT
    rows = ["| policy | PB1 | PB2 | PB3 | other idle | tok/s | p99 TBT |", f"| --- |{' ---: |' * 6}"]
    for run in json.loads((folder / "bench.json").read_text())["runs"]:
        stage_seconds = sum(run["bubble_seconds"].values()) / run["bubble_fraction"]
        shares = [run["bubble_seconds"][cause] / stage_seconds for cause in named]
        shares.append(run["bubble_fraction"] - sum(shares))
        cells = [f"`{run['policy']}`", *(f"{share:.1%}" for share in shares), f"{run['total_token_throughput']:.0f}"]
        rows.append(f"| {' | '.join(cells)} | {run['p99_itl_ms'] / 1e3:.2f} s |")
    return "\n".join(rows)


def densest(ledger: Ledger, cause: Cause, seconds: float) -> tuple[float, float]:
    """Begin and end of the `seconds` of a run that hold most idle time of a cause."""
    starts = np.concatenate([idle.start[idle.cause == CAUSES.index(cause)] for idle in ledger.idle_columns]) - ledger.t0
    lengths = np.concatenate([idle.seconds[idle.cause == CAUSES.index(cause)] for idle in ledger.idle_columns])
    if not len(starts):
        return central(ledger, seconds)
    held = [float(lengths[(starts >= at) & (starts < at + seconds)].sum()) for at in starts]
    last = max(0.0, ledger.span_seconds - seconds)
    start = min(last, max(0.0, float(starts[int(np.argmax(held))]) - 0.05 * seconds))
    return start, start + seconds


def central(ledger: Ledger, seconds: float) -> tuple[float, float]:
    """Begin and end of the `seconds` in the middle of a run."""
    start = max(0.0, (ledger.span_seconds - seconds) / 2)
    return start, start + seconds


if __name__ == "__main__":
    sys.exit(main())
