"""Observed stage times of a run: sizes of micro-batches, and when each stage computed them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from ...core.messages import Span
from ...core.micro_batch_columns import Floats
from ...core.run_record import MicroBatchRecord, RunRecord
from ...simulation.cost.stage_costs import MicroBatchShape
from ..ledger.stragglers import stalls

FAR_APART = 1.8  # least ratio of neighbouring numbers of rows at which a layer's time between them is guessed
_BEYOND = 1.1  # sizes up to this multiple of the run's largest count as known


@dataclass(slots=True)
class Observations:
    """Stage times of a run: the micro-batches that all stages computed, in order.

    Attributes:
        shapes: the micro-batches' sizes.
        begin_times, end_times, ready_times: times on each stage, in seconds, [n, S]. `ready_times`: when a stage
            became ready for its input.
        dispatched, completed: by the coordinator, [n]; NaN if the run ended before a result.
    """

    shapes: list[MicroBatchShape]
    begin_times: Floats
    end_times: Floats
    ready_times: Floats
    dispatched: Floats
    completed: Floats

    @classmethod
    def of(cls, record: RunRecord) -> Observations:
        """Collect the spans of a run."""
        stages = record.num_stages
        spans: dict[int, list[Span | None]] = {}
        for span in record.spans:
            spans.setdefault(span.micro_batch, [None] * stages)[span.stage] = span
        prompts = {request.request: request.prompt_tokens for request in record.requests}
        shapes, times, coordinator = [], [], []
        for micro_batch in sorted(record.micro_batches, key=attrgetter("micro_batch")):
            own = [span for span in spans.get(micro_batch.micro_batch, ()) if span is not None]
            if len(own) < stages or any(span.end <= span.begin for span in own):
                continue
            decodes, chunks = len(micro_batch.decodes), micro_batch.chunks
            ended = [c.start + c.tokens for c in chunks if c.start + c.tokens == prompts.get(c.request)]
            are_known = decodes + len(ended) == micro_batch.sampled_rows
            shapes.append(MicroBatchShape.of_record(micro_batch, sum(ended) if are_known else None))
            times.append([(span.begin, span.end, span.ready) for span in own])
            done = micro_batch.completed
            coordinator.append((micro_batch.dispatched, float("nan") if done is None else done))
        each = np.array(times, np.float64).reshape(-1, stages, 3)
        own_times = np.array(coordinator, np.float64).reshape(-1, 2)
        return cls(shapes, each[..., 0], each[..., 1], each[..., 2], own_times[:, 0], own_times[:, 1])

    @property
    def seconds(self) -> Floats:
        """Compute seconds of each stage, [n, S]."""
        return self.end_times - self.begin_times

    @property
    def begins(self) -> Floats:
        """When the first stage started each micro-batch, [n]."""
        return self.begin_times[:, 0]

    def stalls(self, predicted: Floats) -> npt.NDArray[np.bool_]:
        """Return a mask of the times that are stalls relative to the `predicted` ones, [n, S] both."""
        return stalls(self.seconds, predicted, float(self.end_times.max() - self.begins.min()))

    def __len__(self) -> int:
        return len(self.shapes)


@dataclass(frozen=True, slots=True)
class SizesShown:
    """The sizes of a run's micro-batches. Times of other sizes are guesses.

    Attributes:
        rows: all numbers of tokens, ascending.
        context: most KV tokens attended to by the decodes of a micro-batch.
        prefix: most KV tokens before a chunk.
    """

    rows: tuple[int, ...]
    context: int
    prefix: int

    @classmethod
    def of(cls, shapes: Sequence[MicroBatchShape]) -> SizesShown:
        """Collect the sizes of the shapes of a run's micro-batches."""
        return cls(
            tuple(sorted({shape.rows for shape in shapes})),
            max((shape.context for shape in shapes), default=0),
            max((prefix for shape in shapes for _, prefix in shape.chunks), default=0),
        )

    def hold(self, micro_batch: MicroBatchRecord) -> bool:
        """Return whether the run has shown micro-batches of about this size.

        Its number of tokens must be near a shown one, and all its sizes at most slightly above the largest shown.
        """
        rows = micro_batch.num_tokens
        place = bisect_left(self.rows, rows)
        near = self.rows[max(0, place - 1) : place + 1]
        return (
            rows <= _BEYOND * self.rows[-1]
            and any(rows <= FAR_APART * known and known <= FAR_APART * rows for known in near)
            and micro_batch.decode_context <= _BEYOND * self.context
            and all(chunk.start <= _BEYOND * self.prefix for chunk in micro_batch.chunks)
        )
