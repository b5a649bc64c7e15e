"""MFU and bandwidth share by stage and phase, of runs made by hand."""

from __future__ import annotations

import pytest

from gapless.runtime.analysis.ledger.compute_shares import compute_shares
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.core.compute_share import ComputeShare
from tests.support.hand_made import floor, one_stage


def shares(factor: float = 1.0, replicas: int = 1) -> dict[str, ComputeShare]:
    """Return the shares of `one_stage`, whose ranks are `factor` times as many as two."""
    record = one_stage()
    record.floors = [floor(ranks=round(2 * factor))]
    return {share.phase: share for share in compute_shares(*[(record, Ledger(record))] * replicas)}


def test_shares_by_phase() -> None:
    """A chunk of 8 tokens in 1 s, 4 tokens with a decode of 9 tokens in 2 s, decodes of 10 and 5 in 1 s."""
    found = shares()
    assert list(found) == ["prefill", "decode", "mixed"]
    assert [(each.micro_batches, each.seconds) for each in found.values()] == [(1, 1.0), (1, 1.0), (1, 2.0)]
    pairs = {"prefill": 3 * 36, "decode": 4 * 15, "mixed": 3 * 10 + 4 * 9}
    rows, tokens = {"prefill": 8, "decode": 2, "mixed": 5}, {"prefill": 0, "decode": 4 * 15, "mixed": 4 * 9}
    for phase, share in found.items():
        assert (share.gemm_tflops, share.memory_gigabytes_per_s) == pytest.approx((4.0, 100.0))
        flops, moved = 3e8 * rows[phase] + 1e4 * pairs[phase], 4e8 + 2e3 * tokens[phase]
        assert share.mfu == pytest.approx(flops / 4e12 / share.seconds)
        assert share.bandwidth_share == pytest.approx(moved / 1e11 / share.seconds)
        assert share.floor_seconds == pytest.approx(max(flops / 4e12, moved / 1e11))


def test_more_ranks_reach_less_and_replicas_alike_reach_the_same() -> None:
    once, twice = shares()["decode"], shares(2)["decode"]
    assert (twice.mfu, twice.bandwidth_share) == pytest.approx((once.mfu / 2, once.bandwidth_share / 2))
    several = shares(replicas=3)["decode"]
    assert several.seconds == pytest.approx(3 * once.seconds)
    assert (several.mfu, several.gemm_tflops) == pytest.approx((once.mfu, once.gemm_tflops))


def test_nothing_is_said_of_machines_that_are_not_known() -> None:
    record = one_stage()
    assert compute_shares((record, Ledger(record))) == []
