"""Measures the control path with stages that compute nothing: `python -m benchmarks.control`.

One chunk of 256 tokens and 1 to 256 decodes with contexts of 512 tokens and more, under `sarathi`, over pipelines of 2
to 16 stages. Prints the median microseconds per micro-batch in the scheduler, in the coordinator, in its messages
(encoding and decoding the micro-batch and one result per stage), and in one rank before it computes (block tables,
positions, attention plans of the last stage). Everything runs sequentially in this process, without sockets; in a real
pipeline a rank prepares one micro-batch while it computes another. Policy and coordinator run from sources, since
compiled methods cannot be timed one by one.

Then prints the round trip between real processes with one micro-batch in flight: from the end of a micro-batch on the
last stage to the start of the next one on the first stage. 1 or 31 requests decode. About two minutes.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

os.environ["GAPLESS_COMPILED"] = "0"  # must precede imports of compiled modules

from gapless.conf.build import build, load_group
from gapless.conf.policies import Depth, SarathiConfig
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import ModelConfig
from gapless.models.stage_spec import StageSpec
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from gapless.runtime.analysis.run_folder.read import read_run_folder
from gapless.runtime.core.block_pool import BlockPool
from gapless.runtime.core.messages import MicroBatchMessage, MicroBatchResult, Sampled, Span
from gapless.runtime.core.request import Request
from gapless.runtime.engine.coordinator import Coordinator
from gapless.runtime.pipeline.handshake import Setup, encoder, from_rank, to_rank
from gapless.runtime.pipeline.protocol import WallClock
from gapless.runtime.pipeline.stage_worker import StageWorker
from gapless.runtime.scheduler import Limits
from gapless.runtime.scheduler.policies import make_scheduler

from .support.harness import Benchmark, Row, medians, scratch, words

CHUNK, PROMPT, CONTEXT, BLOCK_SIZE = 256, 4096, 512, 16  # tokens
DECODES = (1, 31, 128, 256)
STAGES = (2, 8, 16)
PARTS = ("scheduler", "coordinator", "message", "rank")
TIMED = ("scheduler", "message", "rank", "empty stages")
SCHEDULER_METHODS = ("next_batch", "predict", "observe", "completed", "resume", "finish")


class Stopwatch:
    """Accumulates the time spent in each part since the last `take`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(TIMED, 0.0)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `call` to add its duration to `part`."""

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds[part] += time.perf_counter() - begin

        return timed

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, dict.fromkeys(TIMED, 0.0)
        return taken


class EmptyPipeline:
    """A `Pipeline` that computes nothing: it encodes, decodes and prepares each message once."""

    def __init__(self, stages: int, num_blocks: int, worker: StageWorker, watch: Stopwatch) -> None:
        self.clock = WallClock()
        self.num_stages = self.depth = stages
        self.num_blocks = num_blocks
        self.where = ["here"] * stages
        self.last: MicroBatchMessage | None = None
        self._waiting: deque[MicroBatchMessage] = deque()
        self._over_wire = watch.timed("message", lambda message: to_rank.decode(encoder.encode(message)))
        self._back = watch.timed("message", lambda results: [from_rank.decode(encoder.encode(r)) for r in results])
        self._prepare = watch.timed("rank", worker.prepare)
        self._compute = watch.timed("empty stages", self._results)

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        self.last = self._over_wire(micro_batch)
        self._prepare(self.last)
        self._waiting.append(micro_batch)

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        return self._back(self._compute(self._waiting.popleft()))

    def _results(self, done: MicroBatchMessage) -> list[MicroBatchResult]:
        now, number = self.clock.now(), done.micro_batch
        rows = sum(chunk.sample for chunk in done.chunks) + len(done.decodes)
        last = self.num_stages - 1
        found = []
        for stage in range(self.num_stages):
            sampled = Sampled([0] * rows) if stage == last else None
            found.append(MicroBatchResult(done.epoch, number, [Span(number, stage, now, now, now, now, now)], sampled))
        return found

    def close(self) -> None:
        pass


def make_worker(num_blocks: int, groups: Groups, depth: int) -> StageWorker:
    """Make a rank with all layers of a tiny model, so that it samples as the last stage does."""
    mapping = load_group("model", "tiny")
    mapping["architecture"]["max_position"] = 1 << 16
    model = build(ModelConfig, mapping, "model")
    assert model.architecture is not None
    spec = StageSpec(
        model=model,
        arch=model.architecture,
        layers=(0, model.architecture.num_layers),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
    )
    return StageWorker.build(Setup([spec], 1, depth, threads=1, timeout_s=60.0), groups)


def measure(decodes: int, stages: int, micro_batches: int, groups: Groups) -> Row:
    """Return the median microseconds per part, for micro-batches of one chunk and `decodes` decodes."""
    outputs = 4 * micro_batches // stages + PROMPT // 2  # no request finishes before enough are measured
    blocks_a_request = -(-max(CONTEXT + outputs, PROMPT + 1) // BLOCK_SIZE)
    watch, num_blocks = Stopwatch(), (decodes + 1) * stages * blocks_a_request
    pipeline = EmptyPipeline(stages, num_blocks, make_worker(num_blocks, groups, stages), watch)
    limits = Limits(decodes + 1, Depth(stages, stages), 1, stages)
    scheduler = make_scheduler(
        SarathiConfig(chunk=CHUNK + decodes, tile=1), limits, BlockPool(num_blocks, BLOCK_SIZE, blocks_a_request)
    )
    for name in SCHEDULER_METHODS:
        setattr(scheduler, name, watch.timed("scheduler", getattr(scheduler, name)))
    coordinator = Coordinator(pipeline, scheduler)
    number = 0

    def add(length: int, max_tokens: int) -> None:
        nonlocal number
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        coordinator.add(Request(number, [7] * length, params, arrival=pipeline.clock.now()))
        number += 1

    for _ in range(decodes * stages):
        add(CONTEXT, outputs)
    found: list[dict[str, float]] = []
    while len(found) < micro_batches:
        while scheduler.num_waiting < 2:
            add(PROMPT, 1)
        watch.take()
        begin = time.perf_counter()
        coordinator.step(pipeline.clock.now() + 1.0)
        total = time.perf_counter() - begin
        last = pipeline.last
        assert last is not None
        if len(last.chunks) == 1 and len(last.decodes) == decodes:
            seconds = watch.take()
            seconds["coordinator"] = total - sum(seconds.values())
            found.append(seconds)
    rows = [{f"{part}_us": each[part] * 1e6 for part in PARTS} for each in found]
    return {"stages": stages, "decodes": decodes, **medians([row | {"sum_us": sum(row.values())} for row in rows])}


def round_trip(stages: int, decodes: int) -> Row:
    """Return the median microseconds of each leg of the round trip between processes that compute a tiny model."""
    keys = (
        f"model=tiny model.architecture.num_layers=16 parallel.pp={stages} parallel.launcher=ray parallel.threads=1 "
        f"parallel.depth=1 scheduler=sarathi workload.num_prompts={decodes} workload.input_len=32 "
        "workload.output_len=200 warmup=false"
    )
    with scratch() as folder:
        command = [sys.executable, "-m", "gapless", "bench", *words(keys, f"hydra.run.dir={folder / 'run'}")]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        record = read_run_folder(folder / "run").load()
    at = {(span.micro_batch, span.stage): span for span in record.spans}
    only_decodes = [found for found in record.micro_batches if not found.chunks]
    legs = []
    for this, following in itertools.pairwise(only_decodes):
        ended, began = at[this.micro_batch, stages - 1].end, at[following.micro_batch, 0].begin
        assert this.completed is not None
        between = {"result": this.completed - ended, "dispatch": following.dispatched - this.completed}
        between |= {"start": began - following.dispatched, "round_trip": began - ended}
        legs.append({f"{leg}_us": seconds * 1e6 for leg, seconds in between.items()})
    return {"stages": stages, "decodes": decodes, **medians(legs)}


def main() -> int:
    bench = Benchmark(__doc__, micro_batches=200)
    torch.set_num_threads(1)
    groups = Groups.start(Rendezvous(0, 1, device="cpu"), Mesh(1, 1), 60.0)
    for stages, decodes in itertools.product(STAGES, DECODES):
        bench.row("micro_batches", **measure(decodes, stages, bench.given.micro_batches, groups))
    groups.close()
    for stages, decodes in itertools.product((2, 4), (1, 31)):
        bench.row("round_trips", **round_trip(stages, decodes))
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
