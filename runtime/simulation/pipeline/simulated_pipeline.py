"""The simulated pipeline: stages on a virtual clock, timed by a cost model."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from ....parallel.placement import StageLink
from ...core.messages import MicroBatchMessage, MicroBatchResult, Sampled, Span
from ...core.run_record import FaultRecord
from ..cost.stage_costs import MicroBatchShape, StageCosts

_SAMPLED_TOKEN = 0


class Disturbance:
    """Random deviations of stage times from the cost model, drawn from `seed`.

    Every time is multiplied by a log-normal factor of mean 1 and coefficient of variation `jitter`. A share
    `straggler_rate` of all times is `straggler_factor` times as long.
    """

    def __init__(
        self, jitter: float = 0.0, straggler_rate: float = 0.0, straggler_factor: float = 1.0, seed: int = 0
    ) -> None:
        self._rate = straggler_rate
        self._factor = straggler_factor
        self._random = random.Random(seed)
        self._sigma = math.sqrt(math.log1p(jitter**2))

    def __call__(self, times: list[float]) -> list[float]:
        """Return stage times with their deviations."""
        draw, sigma, rate, factor = self._random, self._sigma, self._rate, self._factor
        if sigma:
            times = [seconds * draw.lognormvariate(-sigma * sigma / 2, sigma) for seconds in times]
        if rate:
            times = [seconds * factor if draw.random() < rate else seconds for seconds in times]
        return times


class VirtualClock:
    """A clock that advances only when the simulation waits."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        """Return the seconds that have passed in the simulation."""
        return self.seconds


@mypyc_attr(allow_interpreted_subclasses=True)
class SimulatedPipeline:
    """A `Pipeline` of FIFO stages, joined by links that carry one activation at a time.

    `submit` computes when each stage starts and ends the micro-batch; `wait` returns the result when the clock has
    reached its end. Every sampled token is 0, and draft tokens guess 0 too. With speculative decoding, a decode samples
    0 with probability `draft_acceptance`, else another token.

    Args:
        costs: seconds of each stage for a micro-batch.
        stage_links: link from each stage to the next; None: every stage is on another node.
        scatter_gather: each tensor-parallel rank sends its shard, and the receivers all-gather them.
        overlap_sends: a stage computes while it sends; else it is idle until the send is done.
        dispatch_s, result_s: seconds of a message from the coordinator to the ranks, and from the last stage back.
        turnaround_s: seconds that a stage's host takes from the end of a micro-batch until the next may begin.
        draft_acceptance: probability that a draft token is accepted, drawn from `seed`, request and position; None
            without speculative decoding.
    """

    def __init__(
        self,
        costs: StageCosts,
        *,
        depth: int,
        num_blocks: int,
        stage_links: Sequence[StageLink] | None = None,
        scatter_gather: bool = True,
        overlap_sends: bool = True,
        dispatch_s: float = 0.0,
        result_s: float = 0.0,
        turnaround_s: float = 0.0,
        disturbance: Disturbance | None = None,
        draft_acceptance: float | None = None,
        seed: int = 0,
        where: Sequence[str] | None = None,
    ) -> None:
        self.costs = costs
        self.num_stages = costs.num_stages
        self._stages = range(costs.num_stages)
        self.depth = depth
        self.num_blocks = num_blocks
        self.where = list(where or (f"simulated stage {stage}" for stage in range(self.num_stages)))
        self.clock = VirtualClock()
        self.scatter_gather = scatter_gather
        self.overlap_sends = overlap_sends
        self.dispatch_s = dispatch_s
        self.result_s = result_s
        self.turnaround_s = turnaround_s
        self._draft_acceptance = draft_acceptance
        self._seed = seed
        if stage_links is None:
            stage_links = [StageLink(between_nodes=True)] * (self.num_stages - 1)
        self._links = tuple(stage_links)
        self._sends: dict[int, list[float]] = {}  # by rows: seconds over each link, and 0 after the last stage
        self._sampled: dict[int, Sampled] = {}  # by number of rows
        self._free_at = [0.0] * self.num_stages
        self._link_free_at = [0.0] * self.num_stages
        self._results: deque[tuple[float, MicroBatchResult]] = deque()
        self._disturb = disturbance

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        """See `Pipeline.submit`. The times of the micro-batch on all stages are computed at once."""
        assert len(self._results) < self.depth, "more micro-batches outstanding than the depth"
        shape = MicroBatchShape.of(micro_batch)
        rows, times = shape.rows, self.costs.seconds(shape)
        if self._disturb is not None:
            times = self._disturb(times)
        sends = self._sends.get(rows) or self._send(rows)
        ready, links = self._free_at, self._link_free_at
        entered = at = self.clock.seconds + self.dispatch_s
        begins: list[float] = []
        ends: list[float] = []
        arrivals: list[float] = []
        for stage, seconds in enumerate(times):
            begin = max(at, ready[stage])
            end = begin + seconds
            at = max(end, links[stage]) + sends[stage]
            begins.append(begin)
            ends.append(end)
            arrivals.append(at)
        inputs = [entered, *arrivals[:-1]]
        sent = ends if self.overlap_sends else arrivals
        self._free_at = [end + self.turnaround_s for end in sent] if self.turnaround_s else sent
        self._link_free_at = arrivals
        numbers = [micro_batch.micro_batch] * self.num_stages
        spans = list(map(Span, numbers, self._stages, ready, inputs, begins, ends, sent))
        if self._draft_acceptance is None:
            sampled = self._sampled.get(shape.sampled) or self._sample(shape.sampled)
        else:
            sampled = self._draw(micro_batch, shape.sampled, self._draft_acceptance)
        result = MicroBatchResult(micro_batch.epoch, micro_batch.micro_batch, spans, sampled)
        self._results.append((at + self.result_s, result))

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        """See `Pipeline.wait`. The clock moves to the next result, or to `deadline`."""
        clock = self.clock
        if not self._results or self._results[0][0] > deadline:
            clock.seconds = max(clock.seconds, deadline)
            return []
        at, result = self._results.popleft()
        clock.seconds = max(clock.seconds, at)
        return [result]

    def restart(self, fault: FaultRecord) -> None:
        """Fail: only `FaultyPipeline` has faults."""
        raise AssertionError("it has no faults")

    def close(self) -> None:
        """Do nothing: there are no ranks to end."""
        pass

    @property
    def is_empty(self) -> bool:
        """Whether no micro-batch is outstanding."""
        return not self._results

    @property
    def next_event(self) -> float | None:
        """Time of the next result."""
        return self._results[0][0] if self._results else None

    def _sample(self, rows: int) -> Sampled:
        self._sampled[rows] = sampled = Sampled([_SAMPLED_TOKEN] * rows)
        return sampled

    def _draw(self, micro_batch: MicroBatchMessage, rows: int, acceptance: float) -> Sampled:
        """Sample for speculative decoding."""
        tokens = [_SAMPLED_TOKEN] * rows
        for row, decode in enumerate(micro_batch.decodes, rows - len(micro_batch.decodes)):
            if random.Random(f"{self._seed} {decode.request} {decode.start}").random() >= acceptance:
                tokens[row] = _SAMPLED_TOKEN + 1
        return Sampled(tokens)

    def _send(self, rows: int) -> list[float]:
        seconds = [
            source.send(rows, link=link, scatter_gather=self.scatter_gather)
            for source, link in zip(self.costs.operators, self._links, strict=False)
        ]
        self._sends[rows] = [*seconds, 0.0]
        return self._sends[rows]
