"""A process that measures one rank's operators: it builds the rank's stage and runs micro-batches through it."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ...pipeline.handshake import Setup
from ..cost.profile_point import Point
from .grid import MessageMaker

if TYPE_CHECKING:
    import torch

_NUM_WARM_UP = 3  # micro-batches that are not measured


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one rank of `setup` measures. The ranks of a stage have the same points; only the first of them reports."""

    rank: int
    setup: Setup
    device: str
    rendezvous_file: str  # through which the ranks find each other
    todo: list[Point]  # each point as often as it must be measured
    idle: list[Point]  # computed without being measured, after `todo`, while other ranks still measure
    num_blocks: int


def measure(parent: Connection, assignment: Assignment) -> None:
    """Run a measuring rank until `parent` stops it. This is the main function of its process.

    It sends `("ready", None)` and waits for a message. Then it sends `("sample", (point, seconds by operator))` for
    each point of `todo`, and `("done", None)`. Then it computes until the next message. If it fails, it sends
    `("failed", text)`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo prints to standard output
    try:
        _MeasuringRank(assignment).serve(parent)
    except (EOFError, BrokenPipeError):  # the parent is gone
        pass
    except Exception as error:
        parent.send(("failed", f"{type(error).__name__}: {error}".strip()))


class _MeasuringRank:
    """One rank of a stage, its probe, and the micro-batches that it measures."""

    def __init__(self, assignment: Assignment) -> None:
        import torch

        from ....parallel.groups import Groups
        from ....parallel.rendezvous import Rendezvous
        from ...pipeline.stage_worker import StageWorker
        from .probe import Probe

        setup = assignment.setup
        assert setup.threads
        torch.set_num_threads(setup.threads)
        self._mesh = setup.mesh(assignment.rank)
        rendezvous = Rendezvous(
            assignment.rank,
            self._mesh.world_size,
            init_method=f"file://{assignment.rendezvous_file}",
            device=assignment.device,
        )
        self._groups = Groups.start(rendezvous, self._mesh, setup.timeout_s)
        self._worker = StageWorker.build(setup, self._groups)
        stage = self._worker.stage
        for tensor in (*stage.cache.keys, *stage.cache.values):
            tensor.fill_(0.01)  # makes the system allocate the memory: unwritten pages all map to one page of zeros
        self._sampled_rows: torch.Tensor | None = None  # of the micro-batch; None: the head takes all rows
        if stage.final_norm is not None:
            stage.final_norm.register_forward_pre_hook(self._keep_sampled)
        self._probe = Probe(stage)
        self._assignment = assignment
        self._messages = MessageMaker(stage.arch.vocab_size, stage.spec.block_size)
        self._random = random.Random(self._mesh.stage)  # the ranks of a stage draw the same numbers
        max_rows = max(point.rows for point in (*assignment.todo, *assignment.idle))
        self._hidden: torch.Tensor | None = None
        if not stage.mesh.is_first:
            self._hidden = torch.randn(max_rows, stage.arch.hidden_size, dtype=stage.dtype, device=stage.device)

    def serve(self, parent: Connection) -> None:
        """Warm up, measure and report every point of `todo`, then compute until `parent` sends a message."""
        for point in self._assignment.idle[:_NUM_WARM_UP]:
            self._measure(point)
        parent.send(("ready", None))
        parent.recv()
        for point in self._assignment.todo:
            seconds = self._measure(point)
            if self._mesh.tp_rank == 0:
                parent.send(("sample", (point, seconds)))
        parent.send(("done", None))
        while not self._any_stops(parent.poll()):
            self._measure(self._random.choice(self._assignment.idle))
        self._groups.close()

    def _any_stops(self, stop: bool) -> bool:
        """Return whether any rank of this stage must stop, so that all of them stop at the same micro-batch."""
        if self._mesh.tp == 1:
            return stop
        import torch

        num_stopped = torch.tensor([float(stop)], device=self._groups.device)
        return bool(self._groups.all_reduce(num_stopped).item())

    def _measure(self, point: Point) -> dict[str, float]:
        """Return the seconds of one micro-batch by operator, computed as in a real run (`pipeline/rank.py`).

        The stage's compute is timed, and on the last stage the sampler. Preparing the batch is not. Unlike in a run,
        the last layer computes all rows like the others, so that a layer's operators are measured at the point's rows.
        """
        block_size = self._worker.stage.spec.block_size
        last_block = self._assignment.num_blocks - point.slots(block_size) // block_size
        message = self._messages.make(point, self._random.randint(0, last_block))
        worker, hidden = self._worker, self._hidden
        inputs = worker.prepare(message)
        self._sampled_rows = inputs.last_context.rows
        inputs = replace(inputs, last_context=inputs.contexts[-1])
        received: Any = None if hidden is None else hidden[: point.rows].clone()  # the stage may write to it

        def compute() -> None:
            out = worker.forward(inputs, received)
            if worker.stage.mesh.is_last:
                worker.sample(message, out)

        return self._probe.measure(compute, decodes_only=not point.chunk)

    def _keep_sampled(
        self, _: torch.nn.Module, args: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """Pass only the sampled rows to the final norm, as the last layer of a run does."""
        rows = self._sampled_rows
        return args if rows is None else tuple(None if part is None else part[rows] for part in args)
