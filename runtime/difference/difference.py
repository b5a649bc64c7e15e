"""The change of the makespan from one run to another: by part and stage, exactly, and where it begins.

A run's makespan is, on each stage, its compute seconds plus the idle seconds of all causes. So the change of the
makespan is the change of these, on each stage, and in the mean of the stages where these are not the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.micro_batch_columns import Floats
from ..ledger.causes import CAUSES, UNEVEN_WORK, Cause
from ..ledger.fleet import Fleet
from ..ledger.ledger import Ledger
from .compared_speed import ComputeChange, compare_compute

# Parts of the change of compute seconds: other or more micro-batches, the same ones slower or faster, and the same work
# shared by another number of stages. The other parts are the causes of idle time.
WORK, SPEED, STAGES = "work", "speed", "stages"
COMPUTE_PARTS = (WORK, SPEED, STAGES)
PARTS = (*COMPUTE_PARTS, *(str(cause) for cause in CAUSES))
COMPUTE = "compute"
LEDGER_PARTS = (COMPUTE, *(str(cause) for cause in CAUSES))  # what a stage's time is in the ledger of one run
# What a stage has of others: it waits for what another one computes, or for its first or after its last micro-batch.
WAITS = frozenset(str(cause) for cause in (*UNEVEN_WORK, Cause.STARVED_IN_FLIGHT, Cause.FILL_DRAIN))

_TOLERANCE = 1e-9  # of the makespans
_OWN = 1.5  # times the mean speed change of the other stages: from there on it is the stage's own
_FIRST_OF = 0.7  # of the largest: a delay comes down the pipeline, and begins on the first stage that has so much
_CANCELS = 0.3  # of the largest part that is no wait; a smaller change of the makespan is a rest of parts that cancel


@dataclass(frozen=True, slots=True)
class MakespanDifference:
    """The change of the makespan in seconds; each sum is exact.

    Attributes:
        base, run: seconds of each run.
        parts: change by part, in the mean of the stages; sums to `change`.
        by_stage: the same on each stage, each of which sums to `change`; empty where the runs' stages are not the same
            ones, as where they differ in number.
        slowdown: how many times as long the same micro-batch takes, over all stages; `slowdowns` on each.
        weights: seconds that the base run takes for each feature, over all stages.
        stage_names: of each run's stages.
        before, after: seconds of each run by `LEDGER_PARTS`, in the mean of its stages.
        micro_batches, tokens: of each run, the tokens that its micro-batches held.
    """

    base: float
    run: float
    parts: Mapping[str, float]
    by_stage: Sequence[Mapping[str, float]]
    slowdown: float
    slowdowns: Sequence[float]
    weights: Floats
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
        """Assert that the parts sum to the change, in the mean and on each stage."""
        for parts in (self.parts, *self.by_stage):
            error = abs(sum(parts.values()) - self.change)
            assert error <= _TOLERANCE * (self.base + self.run), (parts, self.change)

    @property
    def origin(self) -> Origin:
        """Where the change begins; see `Origin`."""
        return _origin(self)


@dataclass(frozen=True, slots=True)
class Origin:
    """The part that explains most of a change, and the stage that it begins on.

    A slow stage computes longer, and all others wait for it. So what a stage does itself (compute, transport, control)
    counts by its seconds on that stage, what it waits for others by its mean over the stages.

    Attributes:
        part: one of `PARTS`.
        stage: None where no stage has more of it than the others.
        seconds: of the change that the part makes up, on that stage, or in the mean of the stages.
    """

    part: str
    stage: int | None
    seconds: float


def compare_makespans(base: Fleet, run: Fleet) -> MakespanDifference:
    """Divide the change of the makespan from `base` to `run`; either is one pipeline or several replicas."""
    sides = [_Side(base), _Side(run)]
    before, after = sides
    whole = before.compare(after)
    names = before.stage_names, after.stage_names
    slots = len(before.busy), len(after.busy)
    if names[0] == names[1]:
        stages = [before.compare(after, stage) for stage in range(slots[0])]
        by_stage = [
            _parts(compute, 0.0, after.idle[stage] - before.idle[stage]) for stage, compute in enumerate(stages)
        ]
        parts = {part: float(np.mean([changes[part] for changes in by_stage])) for part in PARTS}
    else:
        stages, by_stage = [], []
        per_stage = (1 / slots[0] + 1 / slots[1]) / 2
        shared = (1 / slots[1] - 1 / slots[0]) * (before.busy.sum() + after.busy.sum()) / 2
        compute = ComputeChange(whole.work * per_stage, whole.speed * per_stage, whole.slowdown, whole.weights)
        parts = _parts(compute, float(shared), after.idle.mean(axis=0) - before.idle.mean(axis=0))
    found = MakespanDifference(
        base.span_seconds,
        run.span_seconds,
        parts,
        by_stage,
        whole.slowdown,
        [each.slowdown for each in stages],
        whole.weights,
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


class _Side:
    """One of the two runs: busy seconds [stages], idle seconds [stages, causes], and what its micro-batches held."""

    def __init__(self, fleet: Fleet) -> None:
        numbers = range(fleet.num_stages)
        self.stage_names = [fleet.stage_name(stage) for stage in numbers]
        self.busy: Floats = np.array([fleet.busy_seconds(stage) for stage in numbers])
        self.idle: Floats = np.array([list(fleet.seconds_by_cause(stage).values()) for stage in numbers])
        self._features = [ledger.micro_batches.features for ledger in fleet.ledgers]
        self._ledgers = fleet.ledgers
        self._places = [(n, own) for n, ledger in enumerate(fleet.ledgers) for own in range(ledger.num_stages)]

    @property
    def mean(self) -> dict[str, float]:
        """Seconds by `LEDGER_PARTS`, in the mean of the stages."""
        values = [float(self.busy.mean()), *self.idle.mean(axis=0).tolist()]
        return dict(zip(LEDGER_PARTS, values, strict=True))

    @property
    def micro_batches(self) -> int:
        return sum(len(ledger.micro_batches.micro_batch) for ledger in self._ledgers)

    @property
    def tokens(self) -> int:
        return sum(int(ledger.micro_batches.tokens.sum()) for ledger in self._ledgers)

    def compare(self, other: _Side, stage: int | None = None) -> ComputeChange:
        """Compare the compute of a stage with that of another run's, or that of all stages together."""
        return compare_compute(*self._computed(stage), *other._computed(stage))

    def _computed(self, stage: int | None) -> tuple[Floats, Floats]:
        """Return the features of micro-batches [N, features], and for each the seconds of the stage, or of all."""
        if stage is not None:
            replica, own = self._places[stage]
            return _stage_rows(self._ledgers[replica], self._features[replica], own)
        return _all_rows(self._ledgers, self._features)


def _all_rows(ledgers: Sequence[Ledger], features: Sequence[Floats]) -> tuple[Floats, Floats]:
    rows, seconds = [], []
    for ledger, own in zip(ledgers, features, strict=True):
        summed = np.zeros(len(own) + 1)
        for lane in ledger.lanes:
            np.add.at(summed, ledger.micro_batches.places(lane.micro_batch), lane.seconds)
        rows.append(np.append(own, np.zeros((1, own.shape[1])), axis=0))
        seconds.append(summed)
    return np.concatenate(rows), np.concatenate(seconds)


def _stage_rows(ledger: Ledger, features: Floats, stage: int) -> tuple[Floats, Floats]:
    lane = ledger.lanes[stage]
    rows = np.append(features, np.zeros((1, features.shape[1])), axis=0)  # the last has no record
    return rows[ledger.micro_batches.places(lane.micro_batch)], lane.seconds


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
    """Return what a part makes up on the stage that has most of it, or on all stages if they are about alike."""
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
    """Return the stage that has most of a part."""
    if len(found.by_stage) < 2:
        return None
    return int(np.argmax([sign * parts[part] for parts in found.by_stage]))
