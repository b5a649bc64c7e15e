"""The last layer in the cost model: attention and feed-forward of sampled rows alone, keys and values of all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.core.messages import DecodesMessage, MicroBatchMessage, SegmentMessage
from gapless.runtime.core.stage_floor import LastLayer
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape, StageCosts
from tests.runtime.simulation.cost.test_analytic import operators


def costs(last_layer: LastLayer, layers: tuple[int, ...] = (3, 2), tp: int = 1) -> StageCosts:
    return StageCosts(layers, [operators("a100-80g", "llama2-70b", tp=tp)] * len(layers), last_layer=last_layer)


@st.composite
def shapes(draw: st.DrawFn) -> MicroBatchShape:
    chunks = draw(st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 8192)), max_size=3))
    ends = [draw(st.booleans()) for _ in chunks]
    decodes = draw(st.integers(0 if chunks else 1, 200))
    context = decodes * draw(st.integers(1, 4096))
    ended = sum(sum(chunk) for chunk, ends_here in zip(chunks, ends, strict=True) if ends_here)
    return MicroBatchShape(chunks, decodes, context, decodes + sum(ends), ended)


@given(shapes(), st.sampled_from([1, 4]))
def test_the_operators_of_a_stage_add_up_to_its_time(shape: MicroBatchShape, tp: int) -> None:
    for last_layer in ("sampled", "all"):
        stages = costs(last_layer, tp=tp)
        for stage, seconds in enumerate(stages.seconds(shape)):
            parts = stages.breakdown(shape, stage)
            assert sum(parts.values()) == pytest.approx(seconds, rel=1e-9)
            assert all(part >= -1e-15 for part in parts.values())


@given(shapes())
def test_sampled_rows_cost_at_most_all_rows_and_only_the_last_stage_differs(shape: MicroBatchShape) -> None:
    sampled, every = costs("sampled").seconds(shape), costs("all").seconds(shape)
    assert sampled[0] == every[0]
    assert sampled[1] <= every[1] * (1 + 1e-12)


@given(st.integers(1, 256), st.integers(1, 4096))
def test_a_micro_batch_of_decodes_costs_the_same_either_way(decodes: int, context: int) -> None:
    shape = MicroBatchShape((), decodes, decodes * context, decodes)
    assert costs("sampled").seconds(shape) == costs("all").seconds(shape)


def test_a_chunk_inside_a_prompt_leaves_out_all_after_its_keys() -> None:
    shape = MicroBatchShape(((512, 1024),))
    only = costs("sampled", layers=(1,)).breakdown(shape, 0)
    assert [only[name] for name in ("attn", "postproj", "ffn_ln1", "ffn_ln2", "head")] == [0.0] * 5
    assert only["preproj"] == costs("all", layers=(1,)).breakdown(shape, 0)["preproj"] > 0.0


def test_the_end_of_a_prompt_attends_as_a_decode_over_its_whole_context() -> None:
    ended = costs("sampled", layers=(1,)).breakdown(MicroBatchShape(((512, 1024),), sampled=1), 0)
    decode = costs("sampled", layers=(1,)).breakdown(MicroBatchShape((), 1, 1536, 1), 0)
    for name in ("attn", "postproj", "ffn_ln1", "ffn_ln2"):
        assert ended[name] == pytest.approx(decode[name], abs=1e-15)


def test_a_message_says_the_contexts_of_its_sampled_rows() -> None:
    middle, end = SegmentMessage(1, 100, [7] * 20, [], False), SegmentMessage(2, 30, [7] * 10, [], True)
    shape = MicroBatchShape.of(MicroBatchMessage(0, 0, [middle, end], DecodesMessage.of([3, 4], [5, 6], [1, 1], {})))
    assert (shape.sampled, shape.context, shape.ended) == (3, 13, 40)


def test_whole_layers_leave_out_the_one_that_computes_sampled_rows() -> None:
    assert (costs("sampled").whole_layers, costs("all").whole_layers) == ((3, 1), (3, 2))
