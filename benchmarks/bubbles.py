"""The runs and pictures of `docs/bubbles.md`: `python -m benchmarks.bubbles [pb1 pb2 pb3]`.

Each scene is one `gapless bench` of a few requests over two stages, under a policy that shows a bubble and under those
that remove it; its picture shows where the first run has most of that bubble. About two minutes a scene on 2 cores.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gapless.launch.cli import main as gapless
from gapless.runtime.ledger import CAUSES, Cause, Ledger
from gapless.runtime.report.timeline_png import stretch, write_timeline
from gapless.runtime.run_folder import read_run_folder

IMAGES = Path("docs/images")
COMMON = "model=llama-160m parallel=pp2 parallel.threads=1 cache.num_blocks=2048"


@dataclass(frozen=True, slots=True)
class Scene:
    """`overrides` of `gapless bench`; the picture shows `seconds` of each run."""

    cause: Cause
    overrides: str
    seconds: float


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
        "workload.num_prompts=12",
        1.5,
    ),
}


def main(names: list[str]) -> int:
    for name in names or list(SCENES):
        scene, folder = SCENES[name], Path("runs/bubbles") / name
        command = f"bench {COMMON} {scene.overrides} hydra.run.dir={folder}"
        print(f"\n{name}: gapless {command}", flush=True)
        if code := gapless(shlex.split(command)):
            return code
        runs = {}
        for path in sorted(p for p in folder.iterdir() if (p / "summary.json").is_file()):
            record = read_run_folder(path).load()
            ledger = Ledger(record)
            runs[path.name[3:]] = stretch(record, ledger, densest(ledger, scene.cause, scene.seconds))
        print(write_timeline(IMAGES / f"{name}.png", runs))
    return 0


def densest(ledger: Ledger, cause: Cause, seconds: float) -> tuple[float, float]:
    """The stretch of a run that holds most idle time of a cause; the middle of the run where it has none."""
    starts = np.concatenate([idle.start[idle.cause == CAUSES.index(cause)] for idle in ledger.columns]) - ledger.t0
    lengths = np.concatenate([idle.seconds[idle.cause == CAUSES.index(cause)] for idle in ledger.columns])
    last = max(0.0, ledger.span_seconds - seconds)
    if not len(starts):
        return last / 2, last / 2 + seconds
    held = [float(lengths[(starts >= at) & (starts < at + seconds)].sum()) for at in starts]
    start = min(last, max(0.0, float(starts[int(np.argmax(held))]) - 0.05 * seconds))
    return start, start + seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
