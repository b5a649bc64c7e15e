"""What cost a run most: what stages waited for and what made compute longer, by root, the largest first.

The scale is seconds of the run: those of all stages, over the stages. The ledger's cause says what a stage waited for.
Waits for another stage have several roots: a stage that takes longer than the others for the same micro-batches makes
the others wait, whatever the micro-batches hold. `stage_balance.py` says how much of these waits comes from where; the
rest of each cause is a root of its own. `compute_losses.py` says what of compute was not the work itself, and
`arrivals.py` for how long a queue that grew made the run longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..core.micro_batch_columns import Floats
from ..core.run_record import RunRecord
from ..ledger.causes import UNEVEN_WORK, Cause
from ..ledger.ledger import Ledger
from ..ledger.stragglers import Straggler, find_stragglers
from .arrivals import clients_of, overload_of
from .compute_losses import KnownCosts, compute_losses
from .evidence import evidence_of, of_experts, while_in_flight
from .hops import hops_of
from .roots import Root
from .stage_balance import StageBalance, balance_of

LEAST_SHARE = 0.02  # of stage time: less idle time is not worth removing
_LEAST_COMPUTED = 0.1  # of stage time: less compute beyond the work itself is usual
COMPUTED = (Root.SMALL_CHUNK, Root.SMALL_BATCH, Root.PADDING, Root.TENSOR_PARALLEL, Root.LONG_PROMPTS)
_OF_LOAD = (Root.FEW_REQUESTS, Root.SMALL_BATCH)
_LEAST_RATIO = 1.05  # of a stage's time over the others': less is even
_BY_LAYERS = 0.5  # of a stage's longer time, that its layers explain, from which on they are the root
_MOST_BY_CHANCE = 0.75  # of what chance adds to compute, from which on one stage is the root
_WAITED = [cause.code for cause in UNEVEN_WORK]


_OF_CAUSE = {
    Cause.TRANSPORT: Root.TRANSPORT,
    Cause.CONTROL: Root.CONTROL,
    Cause.CONTENTION: Root.CONTENTION,
    Cause.STARVED_KV_FULL: Root.KV_FULL,
    Cause.RECOVERY: Root.RECOVERY,
    Cause.FILL_DRAIN: Root.FILL_DRAIN,
}
_FEW = (Cause.STARVED_NO_REQUEST, Cause.STARVED_IN_FLIGHT)
_MANY = 2  # times as many requests as stages


@dataclass(frozen=True, slots=True)
class Finding:
    """Time with one root.

    Attributes:
        root: where it begins.
        cause: the ledger's cause that names most of these seconds; None of what is no idle time.
        seconds: summed over all stages.
        share: of all stage time.
        stage: on which it begins, where it is one. Of `transport` the stage that sends.
        evidence: numbers by name, as `evidence.py` says; empty where there is no record.
        by_cause: of roots that several of the ledger's causes have, the seconds of each.
        where: of several replicas the one with most of it, as people read it; empty for a single one.
        there: seconds of that one; of a single run all.
        of_run: seconds of the run, if nothing else changes; 0 of a window of time.
    """

    root: Root
    cause: Cause | None
    seconds: float
    share: float
    stage: int | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)
    by_cause: Mapping[Cause, float] = field(default_factory=dict)
    where: str = ""
    there: float = 0.0
    of_run: float = 0.0

    @property
    def is_large(self) -> bool:
        """Whether it is worth removing."""
        return self.share >= (_LEAST_COMPUTED if self.root in COMPUTED else LEAST_SHARE)


@dataclass(frozen=True, slots=True)
class Findings:
    """Where the stage time of a run, or of a time of it, went.

    Attributes:
        found: idle time by root, the largest first, without what takes no time.
        busy_share: compute, over all stage time.
        num_stages: of all replicas.
        unknown_share: idle time that another engine's trace does not explain, over all stage time.
        beyond: what else made the run longer, the largest first: compute beyond the work itself, which is part of
            `busy_share`, and a queue that grew.
        span: of the run, in seconds; 0 of a window of time.
        bound_share: the work itself, at the best rate of the same devices, over all stage time; None: not known.
        is_foretold: whether `beyond` and the bound are by a cost model, not by times that the run has shown.
    """

    found: tuple[Finding, ...]
    busy_share: float
    num_stages: int
    unknown_share: float = 0.0
    beyond: tuple[Finding, ...] = ()
    span: float = 0.0
    bound_share: float | None = None
    is_foretold: bool = False

    @property
    def ranked(self) -> list[Finding]:
        """All roots on one scale: those that are worth removing, and then the others, the largest first."""
        by_root: dict[Root, Finding] = {}
        for each in (*self.found, *self.beyond):
            other = by_root.get(each.root)  # contention has idle time and compute
            more = (other.seconds, other.share, other.there) if other is not None else (0.0, 0.0, 0.0)
            seconds, share, there = each.seconds + more[0], each.share + more[1], each.there + more[2]
            by_root[each.root] = replace(each, seconds=seconds, share=share, there=there, of_run=share * self.span)
        return sorted(by_root.values(), key=lambda each: (not each.is_large, -each.seconds))

    @property
    def largest(self) -> Finding | None:
        """The largest that is worth removing; None where none is."""
        return next((each for each in self.ranked if each.is_large), None)


def find_causes(
    record: RunRecord,
    ledger: Ledger,
    layers: Sequence[int] | None = None,
    stragglers: Sequence[Straggler] | None = None,
    known: KnownCosts | None = None,
) -> Findings:
    """Find the roots of what made a run longer, each with its evidence.

    Args:
        record: of the run.
        ledger: of the same record.
        layers: of each stage, where they are known.
        stragglers: of the run, where they have been looked for.
        known: the costs of its stages; without them nothing is said of compute.
    """
    if stragglers is None:
        stragglers = find_stragglers(ledger)
    stages = range(ledger.num_stages)
    idle = np.array([list(ledger.seconds_by_cause(stage).values()) for stage in stages], np.float64)
    busy = np.array([ledger.busy_seconds(stage) for stage in stages], np.float64)
    balance = balance_of(ledger, stragglers)
    whole = ledger.stage_seconds
    under_way = sum(hop.total for hop in hops_of(ledger))
    split = _split(idle, balance, under_way, is_shallow=0 < record.depth < ledger.num_stages)
    split = _contended(split, busy, ledger.contended)
    slowest = _slowest(balance, layers)
    if slowest.root == Root.SLOW_STAGE and slowest.stage is not None:
        routed = of_experts(slowest.stage, record)
        slowest = slowest._replace(evidence={**slowest.evidence, **routed})
    slow = [slowest, _worst(stragglers, ledger.num_stages, ledger.t0), _by_chance(balance)]
    running, waiting = while_in_flight(ledger)
    are_there = running >= _MANY * ledger.num_stages or waiting >= 1
    named = [_with_evidence(each, record, ledger) for each in _ranked(split, whole, *slow, are_there=are_there)]
    unknown = float(split.rest[Cause.UNKNOWN.code])
    if whole <= 0:
        return Findings(tuple(named), 0.0, ledger.num_stages)
    busy_share = float(busy.sum()) / whole
    losses = compute_losses(known, record, ledger) if known is not None else {}
    beyond = [
        Finding(root, None, seconds, seconds / whole, evidence=evidence, there=seconds)
        for root, (seconds, evidence) in losses.items()
    ]
    clients = clients_of(record)
    named, beyond = (
        [replace(each, evidence={**each.evidence, **clients}) if each.root in _OF_LOAD else each for each in some]
        for some in (named, beyond)
    )
    if (contended := float(ledger.contended.sum())) > 0:
        lost = Finding(Root.CONTENTION, None, contended, contended / whole, there=contended)
        beyond.append(_with_evidence(lost, record, ledger))
    bound = busy_share - sum(each.share for each in beyond) if known is not None else None
    late, evidence = overload_of(record, ledger)
    if late > 0:
        seconds = late * ledger.num_stages
        beyond.append(Finding(Root.OVERLOAD, None, seconds, seconds / whole, evidence=evidence, there=seconds))
    return Findings(
        tuple(named),
        busy_share,
        ledger.num_stages,
        unknown / whole,
        tuple(sorted(beyond, key=lambda each: -each.seconds)),
        ledger.span_seconds,
        bound,
        known is not None and not known.is_learned,
    )


def join_findings(parts: Sequence[tuple[str, Findings, float]], span: float) -> Findings:
    """Join the findings of several replicas: seconds of a root are summed, the evidence is of the replica with most.

    Args:
        parts: of each replica its name, its findings and its own span in seconds.
        span: of all of them, in seconds. What a replica lacks of it is `fill_drain`.
    """
    whole = span * sum(findings.num_stages for _, findings, _ in parts)
    by_root: dict[Root, list[Finding]] = {}
    for name, findings, own in parts:
        missing = (span - own) * findings.num_stages
        each = [finding for finding in findings.found if finding.root != Root.FILL_DRAIN]
        ends = next((finding for finding in findings.found if finding.root == Root.FILL_DRAIN), None)
        seconds = missing + (ends.seconds if ends is not None else 0.0)
        if seconds > 0:
            late = {**(ends.evidence if ends is not None else {}), "unused_s": span - own}
            each.append(Finding(Root.FILL_DRAIN, Cause.FILL_DRAIN, seconds, 0.0, evidence=late))
        for finding in each:
            by_root.setdefault(finding.root, []).append(replace(finding, where=name))
        for finding in findings.beyond:
            by_root.setdefault(finding.root, []).append(replace(finding, where=name))
    joined = []
    for findings_of_root in by_root.values():
        seconds = sum(finding.seconds for finding in findings_of_root)
        most = max(findings_of_root, key=lambda finding: finding.seconds)
        joined.append(replace(most, seconds=seconds, share=seconds / whole if whole > 0 else 0.0, there=most.seconds))
    busy = sum(findings.busy_share * own * findings.num_stages for _, findings, own in parts)
    joined.sort(key=lambda finding: -finding.seconds)
    beyond = {finding.root for _, findings, _ in parts for finding in findings.beyond}
    bounds = [(findings.bound_share, own * findings.num_stages) for _, findings, own in parts]
    bound = sum(share * own for share, own in bounds if share is not None)
    is_known = whole > 0 and all(share is not None for share, _ in bounds)
    return Findings(
        tuple(each for each in joined if each.root not in beyond),
        busy / whole if whole > 0 else 0.0,
        sum(findings.num_stages for _, findings, _ in parts),
        beyond=tuple(each for each in joined if each.root in beyond),
        span=span,
        bound_share=bound / whole if is_known else None,
        is_foretold=all(findings.is_foretold for _, findings, _ in parts),
    )


@dataclass(frozen=True, slots=True)
class _Split:
    """Idle seconds by what makes them; [causes]: by what the ledger calls them."""

    uneven: Floats  # [causes]
    slow: Floats  # [causes]
    chance: float
    shallow: float
    rest: Floats  # [causes]


def _split(idle: Floats, balance: StageBalance | None, under_way: float, *, is_shallow: bool) -> _Split:
    """Split idle seconds by what makes them.

    Waits for stages that differ are taken from the causes of waits for another stage, in proportion, then from
    `starved_in_flight`, then from `unknown` and `control`, which a slower stage hides, as far as each stage has them.
    Of the other waits for another stage, chance and content have shares as in lockstep; chance beyond these is taken
    from `unknown`. Waits beyond both are for activations: who waits for a micro-batch in flight waits for its way too.
    What is left is for the depth, where fewer micro-batches are in flight than there are stages.

    Args:
        idle: seconds, [stages, causes].
        balance: what the stages' waits for each other come from; None: not known.
        under_way: seconds of all activations.
        is_shallow: whether fewer micro-batches were in flight than there are stages.
    """
    left = idle.copy()
    taken = []
    nothing = np.zeros(len(idle))
    for wanted in (balance.uneven, balance.slow) if balance is not None else (nothing, nothing):
        part = np.zeros_like(left)
        for codes in (_WAITED, [Cause.STARVED_IN_FLIGHT.code], [Cause.UNKNOWN.code, Cause.CONTROL.code]):
            there = left[:, codes].sum(axis=1)
            share = np.minimum(1.0, np.maximum(0.0, wanted - part.sum(axis=1)) / np.where(there > 0, there, 1.0))
            part[:, codes] += left[:, codes] * share[:, None]
        left -= part
        taken.append(part.sum(axis=0))
    rest = left.sum(axis=0)
    waited = float(rest[_WAITED].sum())
    chance, content = (float(balance.chance.sum()), float(balance.content.sum())) if balance is not None else (0.0, 0.0)
    beyond = max(0.0, waited - chance - content) if balance is not None else 0.0
    moving = min(beyond, under_way)
    shallow = beyond - moving if is_shallow else 0.0
    by_chance = (waited - moving - shallow) * chance / (chance + content) if chance + content > 0 else 0.0
    if waited > 0:
        rest[_WAITED] *= max(0.0, waited - moving - shallow - by_chance) / waited
    unexplained = min(float(rest[Cause.UNKNOWN.code]), max(0.0, chance - by_chance))
    rest[Cause.UNKNOWN.code] -= unexplained
    rest[Cause.TRANSPORT.code] += moving
    return _Split(taken[0], taken[1], by_chance + unexplained, shallow, rest)


def _contended(split: _Split, busy: Floats, contended: Floats) -> _Split:
    """Move waits for stages that were slow, as far as these waited for a processor, to contention.

    A stage's excess over the others is theirs by as much as it is less without the seconds in a processor's queue.
    """
    excess, own = np.ptp(busy), np.ptp(busy - contended)
    share = float(np.clip(1 - own / excess, 0.0, 1.0)) if excess > 0 and contended.any() else 0.0
    chance = min(split.chance, float(contended.sum()))
    rest = split.rest.copy()
    rest[Cause.CONTENTION.code] += share * float(split.uneven.sum() + split.slow.sum()) + chance
    return _Split((1 - share) * split.uneven, (1 - share) * split.slow, split.chance - chance, split.shallow, rest)


class _Begin(NamedTuple):
    """Where idle time begins: its root, the stage where it is one, and what shows it."""

    root: Root
    stage: int | None = None
    evidence: Mapping[str, float] = {}


def _slowest(balance: StageBalance | None, layers: Sequence[int] | None) -> _Begin:
    """Return which stage takes the longest for the same micro-batches, why, and by how much."""
    if balance is None:
        return _Begin(Root.SLOW_STAGE)
    usual, last = balance.usual, len(balance.usual) - 1
    stage = int(usual.argmax())
    ratio = _beside_others(usual, stage)
    evidence: dict[str, float] = {"ratio": ratio, "stages": len(usual)}
    if layers is not None and len(layers) == len(usual):
        own = _beside_others(np.array(layers, np.float64), stage)
        evidence |= {"layers": layers[stage], "of_layers": sum(layers)}
        if ratio > 1 and own - 1 >= _BY_LAYERS * (ratio - 1):
            return _Begin(Root.UNEVEN_LAYERS, stage, evidence)
    prompts, decodes = balance.ratio_of_prompts, balance.ratio_of_decodes
    if stage == last and prompts is not None and decodes is not None:
        of_prompts, of_decodes = _beside_others(prompts, stage), _beside_others(decodes, stage)
        if of_decodes > _LEAST_RATIO and of_prompts - 1 < min(0.3, 0.5 * (of_decodes - 1)):
            ratios = {"ratio_of_prompts": of_prompts, "ratio_of_decodes": of_decodes}
            return _Begin(Root.LM_HEAD, stage, evidence | ratios)
    return _Begin(Root.SLOW_STAGE, stage, evidence)


def _beside_others(values: Floats, stage: int) -> float:
    others = float(np.delete(values, stage).mean())
    return float(values[stage]) / others if others > 0 else 1.0


def _worst(stragglers: Sequence[Straggler], num_stages: int, t0: float) -> _Begin:
    """Return the stage that was slow for a while with the longest waits."""
    if not stragglers:
        return _Begin(Root.STRAGGLER)
    each = max(stragglers, key=lambda straggler: straggler.waited)
    when = {"start_s": each.start - t0, "end_s": each.end - t0}
    return _Begin(Root.STRAGGLER, each.stage, {"ratio": each.slowdown, "stages": num_stages, **when})


def _by_chance(balance: StageBalance | None) -> _Begin:
    """Return the stage that takes longer than usual for some micro-batches, where it is mostly one."""
    if balance is None or balance.excess.max() < _MOST_BY_CHANCE * balance.excess.sum():
        return _Begin(Root.CHANCE)
    return _Begin(Root.CHANCE, int(balance.excess.argmax()), {"stages": len(balance.excess)})


def _ranked(
    split: _Split, whole: float, slowest: _Begin, straggler: _Begin, chance: _Begin, *, are_there: bool
) -> list[Finding]:
    """Return all roots that take time, the largest first.

    `are_there` says: while all that run are in flight, many run, or others wait.
    """
    rest = dict(zip(Cause, split.rest.tolist(), strict=True))
    causes_of: dict[Root, tuple[Cause, ...]] = {Root.MICRO_BATCHES: UNEVEN_WORK, Root.FEW_REQUESTS: _FEW}
    if are_there:
        causes_of |= {Root.FEW_REQUESTS: _FEW[:1], Root.DEALING: _FEW[1:]}
    parts = {root: {cause: rest[cause] for cause in causes} for root, causes in causes_of.items()}
    rows: list[tuple[_Begin, Cause, float]] = [
        (slowest, _most(split.uneven), float(split.uneven.sum())),
        (straggler, _most(split.slow), float(split.slow.sum())),
        (chance, Cause.STAGE_IMBALANCE, split.chance),
        (_Begin(Root.DEPTH), Cause.STAGE_IMBALANCE, split.shallow),
        *((_Begin(root), max(part, key=part.__getitem__), sum(part.values())) for root, part in parts.items()),
        *((_Begin(root), cause, rest[cause]) for cause, root in _OF_CAUSE.items()),
    ]
    found = [
        Finding(root, cause, seconds, seconds / whole, stage, evidence, parts.get(root, {}), there=seconds)
        for (root, stage, evidence), cause, seconds in rows
        if seconds > 0 and whole > 0
    ]
    return sorted(found, key=lambda finding: -finding.seconds)


def _most(seconds: Floats) -> Cause:
    return tuple(Cause)[int(seconds.argmax())]


def _with_evidence(finding: Finding, record: RunRecord, ledger: Ledger) -> Finding:
    stage, evidence = evidence_of(finding.root, finding.cause, record, ledger)
    stage = finding.stage if stage is None else stage
    return replace(finding, stage=stage, evidence={**evidence, **finding.evidence})
