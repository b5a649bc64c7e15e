"""A session of measurements: starts ranks that measure concurrently, and collects their samples."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from ...pipeline.handshake import Setup
from ...pipeline.protocol import PipelineError
from ..cost.profile_point import Point
from .measuring_rank import Assignment, measure

_POLL_S = 0.5
Sample = tuple[int, Point, dict[str, float]]  # stage, point, seconds by operator


def missing(points: Sequence[Point], samples: int, have: Counter[Point], seed: int) -> list[Point]:
    """List each point as often as it must still be measured to reach `samples`. `have` counts existing measurements.

    The list covers all points in rounds. Each round is in random order, grouped by size, so that concurrent ranks
    measure points of similar size, as in a run. That matters since decodes are memory-bound and slow each other down.
    """
    generator = random.Random(seed)
    todo: list[Point] = []
    for number in range(samples):
        lacking = [p for p in points if have[p] <= number]
        todo += sorted(generator.sample(lacking, len(lacking)), key=lambda p: (p.rows.bit_length(), p.chunk > 0))
    return todo


def run(setup: Setup, device: str, points: Sequence[Point], todo: Mapping[int, list[Point]]) -> Iterator[Sample]:
    """Start all ranks of `setup`, and yield their measurements as they come.

    Every rank computes until the last measurement, so that all are measured under the same load.

    Args:
        setup: what is measured.
        device: type of the ranks' devices, `cpu` or `cuda`.
        points: micro-batches that a rank computes, unmeasured, once it has measured its own.
        todo: by stage, the points to measure.

    Raises:
        PipelineError: a rank failed or died.
    """
    spawn = multiprocessing.get_context("spawn")
    ranks: dict[Connection, tuple[int, SpawnProcess]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(setup.pp * setup.tp):
                ours, theirs = spawn.Pipe()
                assignment = Assignment(
                    rank,
                    setup,
                    device=f"cuda:{rank}" if device == "cuda" else device,
                    rendezvous_file=str(Path(folder) / "rendezvous"),
                    todo=todo[rank // setup.tp],
                    idle=list(points),
                    num_blocks=setup.num_blocks,
                )
                process = spawn.Process(target=measure, args=(theirs, assignment), daemon=True)
                process.start()
                theirs.close()
                ranks[ours] = rank, process
            yield from _collect(ranks, setup.tp)
            for ours in ranks:
                ours.send("stop")
            for _, process in ranks.values():
                process.join(timeout=10.0)
        finally:
            for _, process in ranks.values():
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(ranks: Mapping[Connection, tuple[int, SpawnProcess]], tp: int) -> Iterator[Sample]:
    """Start the measurements once all ranks are ready; yield samples until all ranks are done."""
    starting, measuring = set(ranks), set(ranks)
    while measuring:
        for ours in wait(list(ranks), timeout=_POLL_S):
            assert isinstance(ours, Connection)
            rank, process = ranks[ours]
            try:
                kind, content = ours.recv()
            except EOFError:
                process.join(timeout=_POLL_S)
                raise PipelineError(f"measuring rank {rank} died (exit code {process.exitcode})") from None
            if kind == "failed":
                raise PipelineError(f"measuring rank {rank} failed: {content}")
            if kind == "ready":
                starting.discard(ours)
                if not starting:
                    for each in ranks:
                        each.send("begin")
            elif kind == "sample":
                yield (rank // tp, *content)
            else:
                measuring.discard(ours)
