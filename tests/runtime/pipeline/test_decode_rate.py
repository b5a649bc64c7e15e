"""The decode speed of a single request is that of a warm decode through all stages."""

from __future__ import annotations

import pytest

from gapless.runtime.core.messages import MicroBatchMessage
from gapless.runtime.pipeline.decode_rate import measure_decode_rate
from tests.support.windowed_pipeline import WindowedPipeline


@pytest.mark.parametrize("windows", [(None,), (None, 6, 6)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_second_decode_is_timed_through_all_stages(windows: tuple[int | None, ...], block_size: int) -> None:
    def seconds(micro_batch: MicroBatchMessage, stage: int) -> float:
        return (5.0, 0.25)[micro_batch.micro_batch] * (1 + stage)

    pipeline = WindowedPipeline(2, 1, len(windows), block_size, seconds, windows=windows)
    assert measure_decode_rate(pipeline, len(windows)) == pytest.approx(1 / 0.75)
    assert [(each.num_tokens, len(each.decodes)) for each in pipeline.micro_batches] == [(1, 1)] * 2
    assert pipeline.wait(99.0) == [], "no result is left"
