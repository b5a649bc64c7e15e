"""The change of the makespan between two runs: an exact breakdown by part and stage, and its origin.

A run's makespan is, on each stage, its compute seconds plus the idle seconds of all causes. So the change of the
makespan is the change of these on each stage, or averaged over the stages if the runs have different stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ....core.micro_batch_columns import Floats
from ...ledger.causes import CAUSES, UNEVEN_WORK, Cause
from .compared_speed import ComputeChange, compare_compute
from .run_side import RunSide

# Parts of the change of compute seconds: other or more micro-batches, the same ones slower or faster, and the same work
# spread over another number of stages. The other parts are the causes of idle time.
WORK, SPEED, STAGES = "work", "speed", "stages"
COMPUTE_PARTS = (WORK, SPEED, STAGES)
PARTS = (*COMPUTE_PARTS, *(str(cause) for cause in CAUSES))
# Idle time caused by other stages: waiting for their compute, or before the first or after the last micro-batch.
WAITS = frozenset(str(cause) for cause in (*UNEVEN_WORK, Cause.STARVED_IN_FLIGHT, Cause.FILL_DRAIN))

_TOLERANCE = 1e-9  # of the makespans
_OWN = 1.5  # a speed change of at least this multiple of the other stages' mean is the stage's own
_FIRST_OF = 0.7  # of the largest: a delay propagates downstream, so it originates on the first stage with this much
_CANCELS = 0.3  # of the largest non-wait part; a smaller change of the makespan is a remainder of cancelling parts


@dataclass(frozen=True, slots=True)
class MakespanDifference:
    """The change of the makespan in seconds; each sum is exact.

    Attributes:
        base, run: seconds of each run.
        parts: change by part, averaged over the stages; sums to `change`.
        by_stage: the same on each stage, each of which sums to `change`; empty if the runs' stages differ.
        slowdown: time of a micro-batch over its time in the base run, over all stages; `slowdowns` on each.
        stage_names: names of each run's stages.
        before, after: seconds of each run by `LEDGER_PARTS`, averaged over its stages.
        micro_batches, tokens: number of micro-batches of each run, and of the tokens in them.
    """

    base: float
    run: float
    parts: Mapping[str, float]
    by_stage: Sequence[Mapping[str, float]]
    slowdown: float
    slowdowns: Sequence[float]
    stage_names: tuple[Sequence[str], Sequence[str]]
    before: Mapping[str, float]
    after: Mapping[str, float]
    micro_batches: tuple[int, int]
    tokens: tuple[int, int]

    @property
    def change(self) -> float:
        """Seconds by which the run is longer than the base; negative if it is shorter."""
        return self.run - self.base

    def check(self) -> None:
        """Assert that the parts sum to the change, on average and on each stage."""
        for parts in (self.parts, *self.by_stage):
            error = abs(sum(parts.values()) - self.change)
            assert error <= _TOLERANCE * (self.base + self.run), (parts, self.change)

    @property
    def origin(self) -> Origin:
        """The origin of the change; see `Origin`."""
        return _origin(self)


@dataclass(frozen=True, slots=True)
class Origin:
    """The part that explains most of a change, and the stage where it originates.

    A slow stage computes longer, and all others wait for it. So a stage's own time (compute, transport, control) counts
    by its seconds on that stage, waiting for others by its mean over the stages.

    Attributes:
        part: one of `PARTS`.
        stage: None if no stage has more of it than the others.
        seconds: contribution of the part to the change, on that stage or averaged over the stages.
    """

    part: str
    stage: int | None
    seconds: float


def compare_makespans(before: RunSide, after: RunSide) -> MakespanDifference:
    """Break down the change of the makespan from one run to another."""

    def compared(stage: int | None = None) -> ComputeChange:
        return compare_compute(*before.computed(stage), *after.computed(stage))

    whole, names, slots = compared(), (before.stage_names, after.stage_names), (len(before.busy), len(after.busy))
    if names[0] == names[1]:
        stages = [compared(stage) for stage in range(slots[0])]
        by_stage = [
            _parts(compute, 0.0, after.idle[stage] - before.idle[stage]) for stage, compute in enumerate(stages)
        ]
        parts = {part: float(np.mean([changes[part] for changes in by_stage])) for part in PARTS}
    else:
        stages, by_stage = [], []
        per_stage = (1 / slots[0] + 1 / slots[1]) / 2
        shared = (1 / slots[1] - 1 / slots[0]) * (before.busy.sum() + after.busy.sum()) / 2
        compute = ComputeChange(whole.work * per_stage, whole.speed * per_stage, whole.slowdown)
        parts = _parts(compute, float(shared), after.idle.mean(axis=0) - before.idle.mean(axis=0))
    found = MakespanDifference(
        before.seconds,
        after.seconds,
        parts,
        by_stage,
        whole.slowdown,
        [each.slowdown for each in stages],
        names,
        before.mean,
        after.mean,
        (before.micro_batches, after.micro_batches),
        (before.tokens, after.tokens),
    )
    found.check()
    return found


def _parts(compute: ComputeChange, stages: float, idle: Floats) -> dict[str, float]:
    return dict(zip(PARTS, [compute.work, compute.speed, stages, *idle.tolist()], strict=True))


def _origin(found: MakespanDifference) -> Origin:
    signs = (1.0, -1.0)
    best_of = {sign: max(_owned(found, sign), key=lambda each: sign * each.seconds) for sign in signs}
    largest = max(signs, key=lambda sign: sign * best_of[sign].seconds)
    cancels = abs(found.change) < _CANCELS * abs(best_of[largest].seconds)
    sign = largest if cancels or found.change == 0 else float(np.sign(found.change))
    best, waits = best_of[sign], {part: seconds for part, seconds in found.parts.items() if part in WAITS}
    if sign * best.seconds >= max(sign * sum(waits.values()), sign * max(waits.values(), key=lambda s: sign * s)):
        return best
    part = max(waits, key=lambda each: sign * waits[each])
    return Origin(part, _most(found, part, sign), waits[part])


def _owned(found: MakespanDifference, sign: float) -> list[Origin]:
    return [_own(found, part, sign) for part in PARTS if part not in WAITS]


def _own(found: MakespanDifference, part: str, sign: float) -> Origin:
    """Return a part's contribution on the stage with most of it, or on all stages if they are about equal."""
    seconds = np.array([sign * parts[part] for parts in found.by_stage])
    if len(seconds) < 2:
        return Origin(part, None, found.parts[part])
    stage = int(np.flatnonzero(seconds >= _FIRST_OF * seconds.max())[0]) if seconds.max() > 0 else 0
    if part in COMPUTE_PARTS:
        stage = int(seconds.argmax())
        others = float(np.delete(seconds, stage).mean())
        if seconds[stage] < _OWN * others:
            return Origin(part, None, found.parts[part])
    return Origin(part, stage, sign * float(seconds[stage]))


def _most(found: MakespanDifference, part: str, sign: float) -> int | None:
    """Return the stage with most of a part."""
    if len(found.by_stage) < 2:
        return None
    return int(np.argmax([sign * parts[part] for parts in found.by_stage]))
