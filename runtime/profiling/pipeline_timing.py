"""Whole steps through a real pipeline, with what lies between stages: sends, dispatch, results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

from ..core.messages import Span
from ..cost.profile_folder import StageSample
from ..cost.profile_point import Point
from ..pipeline.protocol import Pipeline, PipelineError
from .grid import MessageMaker

_WAIT_S = 1.0
_TIMEOUT_S = 300.0


def time_micro_batches(
    pipeline: Pipeline, maker: MessageMaker, points: Iterable[tuple[Point, int]], *, in_flight: int
) -> Iterator[list[StageSample]]:
    """Each point's micro-batch through the pipeline, in order, `in_flight` of them at once; its samples, one a stage.
    With a point stands the first KV block of its requests.

    Raises:
        PipelineError: the pipeline failed.
    """
    assert in_flight <= pipeline.depth
    sent: dict[int, tuple[Point, float]] = {}  # by micro-batch: when it was dispatched
    spans: dict[int, list[Span]] = {}
    ended: dict[int, float] = {}  # by micro-batch: when its tokens came; a stage may tell of it later than the last one
    before: dict[int, float] = {}  # by stage: when it ended the micro-batch before
    rest = list(points)[::-1]
    last_news = pipeline.clock.now()
    while rest or sent:
        while rest and len(sent) - len(ended) < in_flight:
            point, first_block = rest.pop()
            micro_batch = maker.make(point, first_block)
            sent[micro_batch.micro_batch] = point, pipeline.clock.now()
            pipeline.submit(micro_batch)
        for result in pipeline.wait(pipeline.clock.now() + _WAIT_S):
            last_news = pipeline.clock.now()
            spans.setdefault(result.micro_batch, []).extend(result.spans)
            if result.sampled is not None:
                ended[result.micro_batch] = last_news
        while ended and len(spans[first := min(ended)]) == pipeline.num_stages:
            whole = sorted(spans.pop(first), key=attrgetter("stage"))
            yield _samples(in_flight, whole, *sent.pop(first), ended.pop(first), before)
        if pipeline.clock.now() - last_news > _TIMEOUT_S:
            raise PipelineError(f"no step ended within {_TIMEOUT_S:g} s")


def _samples(
    in_flight: int, spans: Sequence[Span], point: Point, dispatched: float, now: float, before: dict[int, float]
) -> list[StageSample]:
    samples = []
    needed = dispatched
    for span in spans:
        own = before.get(span.stage, 0.0)
        bound = "input" if needed >= own else "stage"
        is_last = span is spans[-1]
        samples.append(
            StageSample(
                in_flight, point, span.stage, span.end - span.begin, span.begin - max(needed, own), bound,
                now - span.end if is_last else None,
            )
        )  # fmt: skip
        before[span.stage] = needed = span.end
    return samples
