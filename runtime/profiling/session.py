"""Ranks that measure side by side, started and heard from here."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from ..cost.profile_point import Point
from ..pipeline.handshake import Setup
from ..pipeline.protocol import PipelineError
from .measuring_rank import Assignment, measure

_POLL_S = 0.5
Sample = tuple[int, Point, dict[str, float]]  # stage, what, seconds by operator


def missing(points: Sequence[Point], samples: int, have: Counter[Point], seed: int) -> list[Point]:
    """Each point as often as it lacks measurements, in rounds over all of them, each round in an order of its own.

    Those alike in size follow each other: ranks that begin together are then at alike ones together, as in a run. A
    decode reads weights as fast as memory gives them, and more slowly beside another that does so too.
    """
    order = random.Random(seed)
    todo: list[Point] = []
    for number in range(samples):
        some = [p for p in points if have[p] <= number]
        todo += sorted(order.sample(some, len(some)), key=lambda p: (p.rows.bit_length(), p.chunk > 0))
    return todo


def run(setup: Setup, device: str, points: Sequence[Point], todo: Mapping[int, list[Point]]) -> Iterator[Sample]:
    """Measurements as they come, of `todo` by stage. All ranks of `setup` compute from the first to the last of them.

    Raises:
        PipelineError: a rank failed or died.
    """
    spawn = multiprocessing.get_context("spawn")
    ranks: dict[Connection, tuple[int, SpawnProcess]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(setup.pp * setup.tp):
                ours, theirs = spawn.Pipe()
                where = f"cuda:{rank}" if device == "cuda" else device
                meet = str(Path(folder) / "meet")
                mine = todo[rank // setup.tp]
                assignment = Assignment(rank, setup, where, meet, mine, list(points), setup.num_blocks)
                process = spawn.Process(target=measure, args=(theirs, assignment), daemon=True)
                process.start()
                theirs.close()
                ranks[ours] = rank, process
            yield from _listen(ranks, setup.tp)
            for ours in ranks:
                ours.send("stop")
            for _, process in ranks.values():
                process.join(timeout=10.0)
        finally:
            for _, process in ranks.values():
                if process.is_alive():
                    process.kill()
                process.join()


def _listen(ranks: Mapping[Connection, tuple[int, SpawnProcess]], tp: int) -> Iterator[Sample]:
    """Let all begin once all are ready, hear them until all are through."""
    waiting, measuring = set(ranks), set(ranks)
    while measuring:
        for ours in wait(list(ranks), timeout=_POLL_S):
            assert isinstance(ours, Connection)
            rank, process = ranks[ours]
            try:
                kind, told = ours.recv()
            except EOFError:
                process.join(timeout=_POLL_S)
                raise PipelineError(f"measuring rank {rank} died (exit code {process.exitcode})") from None
            if kind == "failed":
                raise PipelineError(f"measuring rank {rank} failed: {told}")
            if kind == "ready":
                waiting.discard(ours)
                if not waiting:
                    for each in ranks:
                        each.send("begin")
            elif kind == "sample":
                yield (rank // tp, *told)
            else:
                measuring.discard(ours)


def threads_of(threads: int | None, ranks: int) -> int:
    """CPU threads of each of `ranks` ranks of this node, as `runtime/pipeline/rank.py` takes them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return threads or max(1, cores // ranks)
