"""Micro-batches by column: found by their numbers, whatever their order, and passed over where they are not there."""

from __future__ import annotations

import numpy as np
import pytest

from gapless.runtime.core.micro_batch_columns import MicroBatchColumns, values_at
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, SegmentRecord


def micro_batches(*numbers: int) -> MicroBatchColumns:
    return MicroBatchColumns(
        [
            MicroBatchRecord(n, n / 10, [SegmentRecord(0, 7 * n, n)], DecodesRecord.at(), kv_blocks_used=n)
            for n in numbers
        ]
    )


@pytest.mark.parametrize("numbers", [(3, 1, 8), (1, 3, 8), ()])
def test_what_micro_batches_have_is_found_by_their_numbers(numbers: tuple[int, ...]):
    columns, asked = micro_batches(*numbers), np.array([8, 0, 1, 3, 9, 2])
    there = [n if n in numbers else 0 for n in asked.tolist()]
    place = columns.places(asked)
    assert (place >= 0).tolist() == [n > 0 for n in there]
    assert values_at(columns.micro_batch, place).tolist() == values_at(columns.prefill, place).tolist() == there
    assert values_at(columns.chunk_prefix, place).tolist() == [7 * n for n in there]
    assert values_at(columns.dispatched, place).tolist() == [n / 10 for n in there]
    assert columns.micro_batch[columns.by_number].tolist() == sorted(numbers)


def test_a_request_counts_once_however_many_rows_verify_its_drafts():
    first = MicroBatchRecord(0, 0.0, [SegmentRecord(9, 0, 5)], DecodesRecord.at([3, 3, 3, 4], [7, 8, 9, 2]), drafts=2)
    second = MicroBatchRecord(1, 0.1, [], DecodesRecord.at([4, 4, 3], [3, 4, 8]), drafts=1)
    columns = MicroBatchColumns([first, second])
    found = columns.by_request(np.array([1.0, 10.0]))
    assert {request: seconds for request, seconds in found.items() if seconds} == {3: 11.0, 4: 11.0, 9: 1.0}
    assert columns.decodes.tolist() == [4, 3]
    assert columns.context.tolist() == [7 + 8 + 9 + 2 + 4, 3 + 4 + 8 + 3]
    assert first.decodes.distinct == (3, 4)
