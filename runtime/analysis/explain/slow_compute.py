"""Compute far below its machine's rates: the stages concerned, and a sentence on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.compute_share import ComputeShare
from ...core.numbers import number_text
from ...core.stage_floor import StageFloor

_LEAST_FLOOR_S = 1e-3  # per micro-batch: below it, launches and small operators take longer than weights
_LOW = 0.15  # compute below this share of the binding rate is slow: small decode batches of small models reach 0.17
_MOST = 0.5  # share of a stage's compute seconds that must be slow
_SUBJECTS = {"prefill": "prefills run", "decode": "decodes run", "mixed": "prefills and decodes run"}


@dataclass(frozen=True, slots=True)
class SlowCompute:
    """A stage that computes far below its machine's rates. Belongs to `Root.SLOW_COMPUTE`.

    Attributes:
        stage: the stage's number.
        evidence: `seconds` of compute in the phase, their `floor_seconds`, `mfu` and `bandwidth_share`.
        sentence: for display, without a capital letter and a full stop.
    """

    stage: int
    evidence: dict[str, float]
    sentence: str


def find_slow_compute(
    shares: Sequence[ComputeShare],
    floors: Sequence[StageFloor],
    contended: Sequence[float] = (),
    device: str = "processor",
) -> list[SlowCompute]:
    """Return the stages whose compute is slow, the one with the most seconds first.

    A stage is slow if most of its compute time is in phases that reach less than `_LOW` of the binding rate, GEMM or
    memory, and whose micro-batches would take 1 ms or more at that rate. The sentence is on the longest such phase.

    Args:
        shares: a run's compute shares, as returned by `compute_shares`.
        floors: each stage's floor; empty: no reason is given.
        contended: share of each stage's compute seconds spent waiting for a processor, which is a separate cause;
            empty: none.
        device: display name of the machine.
    """
    found = []
    for stage in dict.fromkeys(share.stage for share in shares):
        own = [share for share in shares if share.stage == stage]
        computed = 1.0 - contended[stage] if contended else 1.0
        slow = [share for share in own if _is_slow(share, computed)]
        if sum(share.seconds for share in slow) <= _MOST * sum(share.seconds for share in own):
            continue
        longest = max(slow, key=lambda share: share.seconds)
        names = ("seconds", "floor_seconds", "mfu", "bandwidth_share")
        evidence = {name: float(getattr(longest, name)) for name in names}
        reason = floors[stage].machine.slow_reason if floors else ""
        found.append(SlowCompute(stage, evidence, _sentence(longest, device, reason)))
    return sorted(found, key=lambda each: -each.evidence["seconds"])


def _is_slow(share: ComputeShare, computed: float) -> bool:
    floor = share.floor_seconds
    return floor >= _LEAST_FLOOR_S * share.micro_batches and floor < _LOW * computed * share.seconds


def _sentence(share: ComputeShare, device: str, reason: str) -> str:
    if share.mfu > share.bandwidth_share:
        reached, given, unit, rate = share.mfu, share.gemm_tflops, "TFLOP/s", "GEMM rate"
    else:
        reached, given, unit, rate = share.bandwidth_share, share.memory_gigabytes_per_s, "GB/s", "memory bandwidth"
    numbers = f"{number_text(reached * given)} of {number_text(given)} {unit}"
    because = f": {reason}" if reason else ""
    return f"{_SUBJECTS[share.phase]} at {reached:.0%} of this {device}'s {rate} ({numbers}){because}"
