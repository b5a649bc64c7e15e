"""Measures the decode speed of a single request in a pipeline that has just started."""

from __future__ import annotations

from math import inf

from ...conf.sampling import SamplingParams
from ..core.messages import DecodesMessage, MicroBatchMessage, NewRequest
from .protocol import Pipeline


def measure_decode_rate(pipeline: Pipeline, num_groups: int) -> float:
    """Return the tokens per second of a single request, from the second of two decodes; the first is a warm-up.

    Call it before all other micro-batches: the decodes use KV blocks that no request owns yet.
    """
    sampling = SamplingParams(temperature=0.0)
    blocks = [group * pipeline.num_blocks + group for group in range(num_groups)]  # one per group of layers
    for number, request in enumerate((-3, -2)):  # the engine's ids start at 0, and -1 means none
        decode = DecodesMessage.of([request], [0], [0], {request: blocks})
        new, dropped = [NewRequest(request, 1, 0, sampling, ())], [-3] if number else []
        begin, num_spans = pipeline.clock.now(), 0
        pipeline.submit(MicroBatchMessage(0, number, [], decode, new, dropped))
        while num_spans < pipeline.num_stages:  # the last stage's span arrives with the token
            num_spans += sum(len(result.spans) for result in pipeline.wait(inf))
    return 1 / (pipeline.clock.now() - begin)
