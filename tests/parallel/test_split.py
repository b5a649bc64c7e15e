"""The layer split holds every layer once and is as even as possible, by the layers' times."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.architecture import Architecture
from gapless.conf.errors import ConfigError
from gapless.conf.experts import ExpertsConfig
from gapless.conf.schema import ParallelConfig
from gapless.parallel.split import check_parallel, split_layers

UP = ", parallel.pp any number up to 12"
ARCH = Architecture(
    vocab_size=64,
    hidden_size=64,
    num_layers=12,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    ffn_size=128,
    max_position=64,
)


@given(layers=st.integers(3, 60), pp=st.integers(1, 12), head=st.integers(0, 40))
def test_stages_hold_every_layer_once_and_differ_by_the_head_at_most(layers: int, pp: int, head: int) -> None:
    pp = min(pp, layers)
    arch = dataclasses.replace(ARCH, num_layers=layers)
    split = split_layers(arch, pp, None, times=[1.0] * (layers - 1) + [1.0 + head / 4])
    assert [i for stage in split for i in stage] == list(range(layers))
    assert len(split) == pp
    counts = [len(stage) for stage in split]
    assert min(counts) >= 1
    assert max(counts[:-1], default=0) - min(counts[:-1], default=0) <= 1
    if head:
        assert counts[-1] == min(counts)


def test_a_head_takes_layers_from_the_last_stage_and_an_embedding_from_the_first() -> None:
    def counts(pp: int, first: float = 0.0, last: float = 0.0) -> list[int]:
        times = [2.0 * (1 + first), *[2.0] * 10, 2.0 * (1 + last)]
        return [len(stage) for stage in split_layers(ARCH, pp, None, times=times)]

    assert counts(4) == [3, 3, 3, 3]
    assert counts(3, last=3.0) == [5, 5, 2]
    assert counts(1, last=3.0) == [12]
    assert counts(2, first=2.0) == [5, 7]
    assert counts(4, last=30.0) == [3, 4, 4, 1]


def test_among_splits_about_as_fast_the_one_with_the_least_memory_is_taken() -> None:
    """The embedding and the head, as large as ten layers, lie on the outer stages. An eighth of a layer is no time."""
    large = dataclasses.replace(ARCH, num_layers=10, vocab_size=10 * ARCH.layer_params // ARCH.hidden_size)
    for last in (0.0, 0.1, -0.4):
        split = split_layers(large, 3, None, times=[1.05, *[1.0] * 8, 1.0 + last])
        assert [len(stage) for stage in split] == [3, 4, 3]


def test_given_layers_are_taken() -> None:
    assert split_layers(ARCH, 2, (5, 7)) == [range(5), range(5, 12)]


@given(speeds=st.lists(st.floats(0.2, 8.0), min_size=2, max_size=6), layers=st.integers(12, 100))
def test_faster_stages_take_more_layers(speeds: list[float], layers: int) -> None:
    """No layer moved from one stage to another makes the slowest stage faster."""
    arch = dataclasses.replace(ARCH, num_layers=layers)
    head = 2.25
    times = [1.0] * (layers - 1) + [1.0 + head]
    counts = [len(stage) for stage in split_layers(arch, len(speeds), None, speeds=speeds, times=times)]
    assert (sum(counts), min(counts) >= 1) == (layers, True)

    def slowest(counts: list[int]) -> float:
        extra = [0.0] * (len(counts) - 1) + [head]
        return max((count + more) / speed for count, more, speed in zip(counts, extra, speeds, strict=True))

    for one in range(len(counts)):
        for other in range(len(counts)):
            if one != other and counts[one] > 1:
                moved = [c - (s == one) + (s == other) for s, c in enumerate(counts)]
                assert slowest(counts) <= slowest(moved) + 1e-9


def test_stages_alike_are_split_as_without_speeds() -> None:
    for pp in (1, 3, 5):
        alike = split_layers(ARCH, pp, None, speeds=[2.0] * pp)
        assert [len(stage) for stage in alike] == [len(stage) for stage in split_layers(ARCH, pp, None)]


def test_a_stage_takes_no_more_layers_than_fit_where_the_others_have_room() -> None:
    assert [len(s) for s in split_layers(ARCH, 2, None, speeds=[1.0, 3.0], most=[12, 7])] == [5, 7]
    assert [len(s) for s in split_layers(ARCH, 2, None, speeds=[1.0, 3.0], most=[4, 7])] == [3, 9]  # nothing fits


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"pp": 13}, "parallel.pp=13: must be at most the model's 12 layers"),
        ({"pp": 2, "layers": (5, 6)}, "parallel.layers=[5, 6]: must sum to the model's 12 layers, not 11"),
        ({"tp": 3}, "parallel.tp=3: must divide the model's attention heads, 8; tp may be 1 or 2 or 4" + UP),
        ({"tp": 8}, "parallel.tp=8: must divide the model's KV heads, 4; tp may be 1 or 2 or 4" + UP),
    ],
)
def test_what_cannot_be_split_is_refused(over: dict, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_parallel(ARCH, ParallelConfig(launcher="ray", **over))
    assert str(caught.value) == said


def test_what_can_be_split_passes() -> None:
    check_parallel(ARCH, ParallelConfig(pp=12, tp=4, launcher="ray"))
    with pytest.raises(ConfigError, match="feed-forward size, 130"):
        check_parallel(dataclasses.replace(ARCH, ffn_size=130), ParallelConfig(tp=4, launcher="ray"))


def test_experts_are_split_by_slices_or_whole() -> None:
    arch = dataclasses.replace(ARCH, experts=ExpertsConfig(num_experts=6, experts_per_token=2), ffn_size=128)

    def refused(arch: Architecture, **over: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            check_parallel(arch, ParallelConfig(launcher="ray", **over))
        return str(caught.value)

    for whole in (False, True):
        check_parallel(arch, ParallelConfig(tp=2, launcher="ray", expert_parallel=whole))
    check_parallel(arch, ParallelConfig(tp=4, launcher="ray"))
    assert (
        refused(arch, tp=4, expert_parallel=True)
        == "parallel.tp=4: must divide the model's experts, 6; tp may be 1 or 2" + UP
    )
    odd = dataclasses.replace(arch, ffn_size=130)
    assert "must divide the model's experts' size, 130; tp may be 1 or 2," in refused(odd, tp=4)
    shared = dataclasses.replace(arch, experts=dataclasses.replace(arch.experts, shared_ffn_size=30))
    assert refused(shared, tp=4).startswith(
        "parallel.tp=4: must divide the model's shared expert's size, 30; tp may be 1 or 2,"
    )
    assert refused(ARCH, tp=2, expert_parallel=True) == (
        "parallel.expert_parallel=true: must be false for a model without experts"
    )


def test_ranks_beyond_the_kv_heads_copy_them_where_a_model_is_only_simulated() -> None:
    arch = dataclasses.replace(ARCH, experts=ExpertsConfig(num_experts=8, experts_per_token=2))
    check_parallel(arch, ParallelConfig(tp=8, launcher="ray"), copies_heads=True)
    with pytest.raises(ConfigError, match="KV heads, 4"):
        check_parallel(arch, ParallelConfig(tp=8, launcher="ray"))
    six = dataclasses.replace(arch, num_heads=12, num_kv_heads=6)
    with pytest.raises(ConfigError, match="KV heads, 6"):
        check_parallel(six, ParallelConfig(tp=4, launcher="ray"), copies_heads=True)


@given(
    times=st.lists(st.floats(0.1, 5), min_size=4, max_size=9, unique=True),
    pp=st.integers(1, 4),
    speeds=st.lists(st.floats(0.5, 2), min_size=4, max_size=4),
)
def test_layers_that_differ_are_split_so_that_the_slowest_stage_is_fastest(
    times: list[float], pp: int, speeds: list[float]
) -> None:
    pp = min(pp, len(times))
    arch = dataclasses.replace(ARCH, num_layers=len(times))

    def slowest(ends: Sequence[int]) -> float:
        own = [sum(times[first:end]) for first, end in zip([0, *ends], [*ends, len(times)], strict=True)]
        return max(time / speed for time, speed in zip(own, speeds, strict=False))

    split = split_layers(arch, pp, None, speeds=speeds[:pp], times=times)
    assert [i for layers in split for i in layers] == list(range(len(times)))
    best = min(slowest(ends) for ends in itertools.combinations(range(1, len(times)), pp - 1))
    assert slowest([layers.stop for layers in split[:-1]]) == pytest.approx(best, rel=1e-6)
