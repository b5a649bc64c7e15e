"""When compute is called slow, and how that is said."""

from __future__ import annotations

import pytest

from gapless.runtime.analysis.explain.slow_compute import find_slow_compute
from gapless.runtime.core.compute_share import ComputeShare
from tests.support.hand_made import floor


def share(
    stage: int = 0,
    phase: str = "decode",
    seconds: float = 10.0,
    mfu: float = 0.001,
    bandwidth: float = 0.03,
    number: int = 20,
) -> ComputeShare:
    """Return the share of a machine of 0.15 TFLOP/s and 20 GB/s."""
    return ComputeShare(stage, phase, number, seconds, seconds * max(mfu, bandwidth), mfu, bandwidth, 0.15, 20.0)


def test_the_sentence_names_the_nearer_rate_and_the_reason() -> None:
    reason = "this build has no kernels for its instruction set"
    (found,) = find_slow_compute([share()], [floor(slow_reason=reason)])
    assert found.sentence == f"decodes run at 3% of this processor's memory bandwidth (0.6 of 20.0 GB/s): {reason}"
    assert found.evidence == pytest.approx(
        {"seconds": 10.0, "floor_seconds": 0.3, "mfu": 0.001, "bandwidth_share": 0.03}
    )
    (found,) = find_slow_compute([share(phase="prefill", mfu=0.1)], [floor()], device="device")
    assert found.sentence == "prefills run at 10% of this device's GEMM rate (0.015 of 0.15 TFLOP/s)"
    assert find_slow_compute([share(phase="mixed")], [])[0].sentence.startswith("prefills and decodes run at 3% of")


@pytest.mark.parametrize(
    "healthy",
    [
        share(bandwidth=0.3),
        share(mfu=0.3),
        share(number=400),  # whose floor is below 1 ms
    ],
)
def test_what_is_fast_or_small_is_not_slow(healthy: ComputeShare) -> None:
    assert find_slow_compute([healthy], []) == []


def test_waiting_for_a_processor_is_another_cause() -> None:
    assert find_slow_compute([share(bandwidth=0.12)], [], [0.1]) != []
    assert find_slow_compute([share(bandwidth=0.12)], [], [0.3]) == []


def test_most_of_a_stage_must_be_slow() -> None:
    fast = share(phase="prefill", seconds=11.0, mfu=0.6)
    assert find_slow_compute([share(), fast], []) == []
    assert find_slow_compute([share(seconds=12.0), fast], [])[0].evidence["seconds"] == 12.0
    found = find_slow_compute([share(0), share(1, seconds=30.0), share(2, bandwidth=0.9)], [floor()] * 3)
    assert [each.stage for each in found] == [1, 0]
