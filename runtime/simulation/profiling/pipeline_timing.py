"""Times whole micro-batches through the real pipeline: each stage's compute, sends, dispatch and results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from ...core.messages import Span
from ...pipeline.protocol import Pipeline, PipelineError
from ..cost.profile_folder import StageSample
from ..cost.profile_point import Point
from .grid import MessageMaker

_POLL_S = 1.0
_TIMEOUT_S = 300.0


def time_micro_batches(
    pipeline: Pipeline, maker: MessageMaker, points: Iterable[tuple[Point, int]], *, in_flight: int
) -> Iterator[list[StageSample]]:
    """Run the micro-batch of each point through the pipeline, and yield its samples, one for each stage.

    Args:
        pipeline: has nothing in flight.
        maker: makes the micro-batch of a point.
        points: each point with the first KV block of its requests. They run in this order.
        in_flight: micro-batches in the pipeline at once, at most its depth.

    Raises:
        PipelineError: the pipeline failed, or no micro-batch ended within a time limit.
    """
    assert in_flight <= pipeline.depth
    sent: dict[int, tuple[Point, float]] = {}  # by micro-batch: when it was dispatched
    spans: dict[int, list[Span]] = {}
    ended: dict[int, float] = {}  # by micro-batch: when its tokens arrived, possibly before the spans of all stages
    stage_ends: dict[int, float] = {}  # by stage: when its last micro-batch ended
    remaining = list(points)[::-1]
    last_result = pipeline.clock.now()
    while remaining or sent:
        while remaining and len(sent) - len(ended) < in_flight:
            point, first_block = remaining.pop()
            message = maker.make(point, first_block)
            sent[message.micro_batch] = point, pipeline.clock.now()
            pipeline.submit(message)
        for result in pipeline.wait(pipeline.clock.now() + _POLL_S):
            last_result = pipeline.clock.now()
            spans.setdefault(result.micro_batch, []).extend(result.spans)
            if result.sampled is not None:
                ended[result.micro_batch] = last_result
        while ended and len(spans[first := min(ended)]) == pipeline.num_stages:
            in_order = sorted(spans.pop(first), key=attrgetter("stage"))
            yield _samples(in_flight, in_order, *sent.pop(first), ended.pop(first), stage_ends)
        if pipeline.clock.now() - last_result > _TIMEOUT_S:
            raise PipelineError(f"no micro-batch ended within {_TIMEOUT_S:g} s")


def _samples(
    in_flight: int, spans: Sequence[Span], point: Point, dispatched: float, ended: float, stage_ends: dict[int, float]
) -> list[StageSample]:
    """Make the samples of one micro-batch from its spans, in the order of the stages; update `stage_ends`."""
    samples = []
    input_done = dispatched
    for span in spans:
        stage_free = stage_ends.get(span.stage, 0.0)
        bound = "input" if input_done >= stage_free else "stage"
        is_last = span is spans[-1]
        samples.append(
            StageSample(
                in_flight,
                point,
                span.stage,
                span.end - span.begin,
                span.begin - max(input_done, stage_free),
                bound,
                ended - span.end if is_last else None,
            )
        )
        stage_ends[span.stage] = input_done = span.end
    return samples
