"""A process that measures: it holds a stage as a rank does, and runs the grid's micro-batches through it."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ..cost.profile_point import Point
from ..pipeline.handshake import Setup
from .grid import MessageMaker

if TYPE_CHECKING:
    import torch

_WARM_UP = 3  # micro-batches that do not count


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one of the ranks of `setup` measures: `todo` holds a point as often as it is to be measured. Tensor-parallel
    ranks of a stage have the same, and the first of them tells."""

    rank: int
    setup: Setup
    device: str
    meet: str  # the file through which the ranks find each other
    todo: list[Point]
    idle: list[Point]  # what it computes, unmeasured, once it is through, while others still measure
    num_blocks: int


def measure(to_us: Connection, assignment: Assignment) -> None:
    """Send `("ready", None)`, wait for a word, then send `("sample", (point, seconds by operator))` for each of `todo`,
    then `("done", None)`, and compute on until another word comes. A failure is sent as `("failed", text)`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo talks on standard output
    try:
        _Rank(assignment).serve(to_us)
    except (EOFError, BrokenPipeError):  # the parent is gone
        pass
    except Exception as error:
        to_us.send(("failed", f"{type(error).__name__}: {error}".strip()))


class _Rank:
    def __init__(self, of: Assignment) -> None:
        import torch

        from ...parallel.groups import Groups
        from ...parallel.mesh import Mesh
        from ...parallel.rendezvous import Rendezvous
        from ..pipeline.stage_worker import StageWorker
        from .probe import Probe

        setup = of.setup
        assert setup.threads
        torch.set_num_threads(setup.threads)
        self._mesh = Mesh(setup.pp, setup.tp, of.rank)
        rendezvous = Rendezvous(of.rank, self._mesh.world_size, init_method=f"file://{of.meet}", device=of.device)
        self._groups = Groups.start(rendezvous, self._mesh, setup.timeout_s)
        self._worker = StageWorker.build(setup, self._groups)
        stage = self._worker.stage
        for tensor in (*stage.cache.keys, *stage.cache.values):
            tensor.fill_(0.01)  # so that the memory is really there: pages never written are all one
        self._probe = Probe(stage)
        self._of = of
        self._micro_batches = MessageMaker(setup.arch.vocab_size, setup.block_size)
        self._random = random.Random(self._mesh.stage)  # ranks of a stage do the same
        most = max(point.rows for point in (*of.todo, *of.idle))
        self._hidden: torch.Tensor | None = None
        if not stage.mesh.is_first:
            self._hidden = torch.randn(most, setup.arch.hidden_size, dtype=stage.dtype, device=stage.device)

    def serve(self, to_us: Connection) -> None:
        for point in self._of.idle[:_WARM_UP]:
            self._run(point)
        to_us.send(("ready", None))
        to_us.recv()
        for point in self._of.todo:
            seconds = self._run(point)
            if self._mesh.tp_rank == 0:
                to_us.send(("sample", (point, seconds)))
        to_us.send(("done", None))
        while not self._agree(to_us.poll()):
            self._run(self._random.choice(self._of.idle))
        self._groups.close()

    def _agree(self, stop: bool) -> bool:
        """Whether any rank of this stage has heard the word: they stop at the same micro-batch."""
        if self._mesh.tp == 1:
            return stop
        import torch

        from ...parallel.layers import all_reduce

        heard = torch.tensor([float(stop)], device=self._groups.device)
        return bool(all_reduce(heard, self._groups.tp).item())

    def _run(self, point: Point) -> dict[str, float]:
        """As a rank does (`pipeline/rank.py`): tables first, then, timed, the stage and on the last one the sampler."""
        room = self._of.num_blocks - point.slots(self._of.setup.block_size) // self._of.setup.block_size
        micro_batch = self._micro_batches.make(point, self._random.randint(0, room))
        worker, hidden = self._worker, self._hidden
        batch = worker.prepare(micro_batch)
        given: Any = None if hidden is None else hidden[: point.rows]

        def compute() -> None:
            out = worker.forward(batch, given)
            if worker.stage.mesh.is_last and worker.stage.mesh.tp_rank == 0:
                worker.sample(micro_batch, out)

        return self._probe.measure(compute)
