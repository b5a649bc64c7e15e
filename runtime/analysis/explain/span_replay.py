"""Measures causes by replays of a run's recorded spans (`span_times.py`): the run minus its replay without the cause.

For runs without a simulated twin: traces from other engines, replicas of a fleet, windows of a server. The contents of
micro-batches stay as recorded, so causes that change them (a pipeline depth below the number of stages) have no size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from ...core.micro_batch_columns import Floats, Ints, values_at
from ...core.run_record import MicroBatchRecord, RunRecord, Wait
from ...core.student import t_quantile
from ..ledger.causes import Cause
from ..ledger.ledger import Ledger
from ..ledger.recovery import down_seconds
from ..ledger.stragglers import Straggler, find_stragglers
from .content import content_of, held_by
from .hot_experts import hot_experts
from .roots import Root
from .sized_cause import COMPUTE, SizedCause
from .span_times import Bools, Times, times_of

_LATE = (Root.TRANSPORT, Root.CONTROL)  # processor contention delays links and the coordinator, too
_LEAST_OF_A_KIND = 8  # micro-batches
_MOST = 2 / 3  # least share of the contended seconds for a single stage to be named
_ALIKE = 1.05  # largest ratio to the lower median of the stages for a stage to count as normal
_LEAST_EXCESS = 0.02  # least relative excess of a stage's time over the others'
_SURE = 2.5  # least excess in standard errors
_BY_LAYERS = 0.5  # least share of a stage's excess that its layers must explain to be named as the root
_OUTLIER = 6.0  # median absolute deviations
_BLOCKS = 8  # of a run, for the variance of a cause
_OUTSIDE = 0.1  # of outcomes, outside the interval of a cause
_MODEL_ERROR = 0.05  # of a size


@dataclass(frozen=True, slots=True)
class _Without:
    """The run's times without a cause.

    Attributes:
        root, stage, evidence: as in `SizedCause`.
        times: to replay.
        ratios: share of the affected time that is removed, by block of the run.
    """

    root: Root
    times: Times
    stage: int | None = None
    ratios: Floats = field(default_factory=lambda: np.ones(_BLOCKS))
    evidence: Mapping[str, float] = field(default_factory=dict)


def replayed_spans(
    record: RunRecord,
    ledger: Ledger,
    layers: Sequence[int] | None = None,
    stragglers: Sequence[Straggler] | None = None,
) -> list[SizedCause]:
    """Return the causes worth fixing, largest first; causes that may follow from another come last.

    Args:
        record: the run's record.
        ledger: the record's ledger.
        layers: layers of each stage, if known.
        stragglers: the run's stragglers, if already computed.
    """
    run = SpanReplay.of(record, ledger)
    if run is None:
        return []
    stragglers = find_stragglers(ledger) if stragglers is None else stragglers
    causes = [_size(run, without) for without in _without(run, layers, stragglers)]
    causes.append(_down(run))
    found = [each for each in causes if each is not None]
    late = _LATE if any(each.cause == Root.CONTENTION for each in found) else ()
    return sorted(found, key=lambda each: (each.low <= 0, each.cause in late, -each.low - each.high))


def _size(run: SpanReplay, without: _Without) -> SizedCause | None:
    """Return a cause with its size; None if it is small or not significant."""
    begins, ends = without.times.replay()
    seconds, whole = float(run.ends.max() - ends.max()), run.ledger.span_seconds
    spread = float(without.ratios.std(ddof=1)) / _BLOCKS**0.5 / max(1e-9, float(without.ratios.mean()))
    off = seconds * (t_quantile(_OUTSIDE, _BLOCKS - 1) * spread + _MODEL_ERROR)
    is_most = without.root == Root.MICRO_BATCHES  # an upper bound: no policy makes them entirely equal
    low, high = (0.0, seconds) if is_most else (seconds - off, seconds + off)
    if seconds < without.root.least * whole or (low <= 0 and not is_most):
        return None
    shows = run.shows(begins, ends)
    stage = _contended_stage(run.ledger) if without.root == Root.CONTENTION else without.stage
    return SizedCause(without.root, seconds, low, high, seconds / whole, stage, shows, without.evidence)


def _contended_stage(ledger: Ledger) -> int | None:
    """Return the stage with most of the time spent waiting for a processor; None if it is spread over several."""
    waited = ledger.contended + [ledger.seconds_by_cause(stage)[Cause.CONTENTION] for stage in range(ledger.num_stages)]
    stage = int(waited.argmax())
    return stage if len(waited) > 1 and waited[stage] >= _MOST * waited.sum() else None


def _down(run: SpanReplay) -> SizedCause | None:
    """Return the downtime of the pipeline as a cause; None if it is short."""
    seconds, whole = down_seconds(run.record.faults, run.ledger.t1), run.ledger.span_seconds
    if seconds < Root.RECOVERY.least * whole:
        return None
    idle = run.ledger.seconds_by_cause()[Cause.RECOVERY]
    shows = {Cause.RECOVERY: idle, COMPUTE: seconds * run.ledger.num_stages - idle}
    numbers = {"faults": float(len(run.record.faults))}
    return SizedCause(Root.RECOVERY, seconds, seconds, seconds, seconds / whole, None, shows, numbers)


@dataclass(frozen=True, slots=True)
class SpanReplay:
    """A run, the times to replay it from, and the resulting start and end of each micro-batch by stage, [S, N]."""

    record: RunRecord
    ledger: Ledger
    times: Times
    places: Sequence[Ints]
    begins: Floats
    ends: Floats

    @classmethod
    def of(cls, record: RunRecord, ledger: Ledger) -> SpanReplay | None:
        """Return the replay of a run; None if it is too short."""
        found = times_of(record, ledger)
        return None if found is None or ledger.span_seconds <= 0 else cls(record, ledger, *found, *found[0].replay())

    @property
    def numbers(self) -> Ints:
        """The replayed micro-batches."""
        return self.ledger.lanes[0].micro_batch[self.places[0]]

    @property
    def is_explained(self) -> Bools:
        """Mask of micro-batches delayed by the coordinator alone; traces from other engines may not record that."""
        return np.array([not each or each[-1].reason != "unknown" for each in self._waits])

    @property
    def is_idle(self) -> Bools:
        """Mask of micro-batches before which the coordinator had no request."""
        return np.array([any(wait.reason == "no_request" for wait in each) for each in self._waits])

    @property
    def _waits(self) -> list[list[Wait]]:
        places = self.ledger.micro_batches.places(self.numbers).tolist()
        return [self.record.micro_batches[place].waits for place in places]

    @property
    def contended(self) -> Floats:
        """Seconds for which ranks waited for a processor before and within each computation, [2, S, N]."""
        row = {number: place for place, number in enumerate(self.numbers.tolist())}
        found = np.zeros((2, *self.begins.shape))
        for span in self.record.spans:
            if (span.contended_before or span.contended) and span.micro_batch in row:
                found[:, span.stage, row[span.micro_batch]] = span.contended_before, span.contended
        return found

    @property
    def kinds(self) -> list[Bools]:
        """Masks of the micro-batches with and without prompt tokens; a single mask of all if either kind is rare."""
        held = self.ledger.micro_batches
        has_prompt = values_at(held.prefill, held.places(self.numbers)) > 0
        few = min(has_prompt.sum(), (~has_prompt).sum()) < _LEAST_OF_A_KIND
        return [np.ones(len(has_prompt), bool)] if few else [has_prompt, ~has_prompt]

    def shows(self, begins: Floats, ends: Floats) -> dict[str, float]:
        """Return the stage-seconds that a replay saves, by the ledger's causes, and of compute."""
        is_whole = sum(map(len, self.places)) == len(self.record.spans)
        before = self.ledger if is_whole else Ledger(self.record_with(self.begins, self.ends))
        after = Ledger(self.record_with(begins, ends))
        idle, left = before.seconds_by_cause(), after.seconds_by_cause()
        found = {str(cause): idle[cause] - left[cause] for cause in idle}
        return {COMPUTE: before.busy_seconds() - after.busy_seconds(), **found}

    def record_with(self, begins: Floats, ends: Floats) -> RunRecord:
        """Return the run's record with spans at `begins` and `ends`, [S, N], and stage-0 waits adjusted to them."""
        row = {number: place for place, number in enumerate(self.numbers.tolist())}
        began, ended, was = begins.tolist(), ends.tolist(), self.ends
        spans = []
        for span in self.record.spans:
            if (at := row.get(span.micro_batch)) is not None:
                begin, end = began[span.stage][at], ended[span.stage][at]
                shorter = max(0.0, (span.end - span.begin) - (end - begin))
                spans.append(
                    msgspec.structs.replace(
                        span,
                        begin=begin,
                        end=end,
                        sent=end + span.sent - span.end,
                        contended=max(0.0, span.contended - shorter),
                    )
                )
        starts, new_starts = (
            np.append(first[:1], last[:-1]) for first, last in ((self.begins[0], was[0]), (begins[0], ends[0]))
        )
        gaps = list(zip(starts.tolist(), self.begins[0].tolist(), strict=True))
        new = list(zip(new_starts.tolist(), began[0], strict=True))
        later = ends[-1] - was[-1]
        follows = self.times.follows
        dispatched = np.where(follows >= 0, later[follows], 0.0).tolist()
        batches = []
        for each in self.record.micro_batches:
            if (at := row.get(each.micro_batch)) is not None:
                moved = _moved(each, gaps[at], new[at], dispatched[at])
                moved.completed = None if each.completed is None else each.completed + float(later[at])
                batches.append(moved)
        opened, closed = self.record.window
        closed = None if closed is None else closed + float(ends.max() - was.max())
        return replace(self.record, spans=spans, micro_batches=batches, window=(opened, closed))


def _moved(
    each: MicroBatchRecord, gap: tuple[float, float], new: tuple[float, float], later: float
) -> MicroBatchRecord:
    """Return a micro-batch dispatched `later`, with the waits before it fitted to its new gap on stage 0."""
    last = each.waits[-1].end if each.waits else each.dispatched
    over, new_over = min(max(last, gap[0]), gap[1]), min(last + later, new[1])
    if new_over <= new[0]:  # the stage was still busy
        waits = [Wait(wait.start + later, wait.end + later, wait.reason) for wait in each.waits]
    elif over <= gap[0] or not each.waits:
        waits = [Wait(new[0], new_over, each.waits[-1].reason if each.waits else "depth_full")]
    else:
        scale = (new_over - new[0]) / (over - gap[0])
        waits = [
            Wait(new_over - (over - wait.start) * scale, new_over - (over - wait.end) * scale, wait.reason)
            for wait in each.waits
        ]
    return msgspec.structs.replace(each, waits=waits, dispatched=each.dispatched + later)


def _without(run: SpanReplay, layers: Sequence[int] | None, stragglers: Sequence[Straggler]) -> Iterator[_Without]:
    """Yield the run's times without each cause."""
    times = run.times
    slowdown = np.ones_like(times.compute)
    for each in stragglers:
        slow = (run.begins[each.stage] >= each.start) & (run.begins[each.stage] < each.end)
        slowdown[each.stage, slow] = each.slowdown
    before, within = run.contended
    usual = np.maximum(times.compute - within, 1e-9) / slowdown
    if len(usual) > 1:
        alike = usual.copy()
        for kind in run.kinds:
            alike[:, kind] = _alike(usual[:, kind])
        yield from _uneven(run, usual, alike, slowdown, within, layers)
        expected = _expected(run, alike)
        likely = usual * expected / alike
        yield _Without(Root.CHANCE, replace(times, compute=likely * slowdown + within))
        evened = times.compute * expected.mean(axis=1, keepdims=True) / expected
        yield _Without(Root.MICRO_BATCHES, replace(times, compute=evened))
        no_link, no_send = np.zeros_like(times.link), np.zeros_like(times.send)
        yield _Without(Root.TRANSPORT, replace(times, link=no_link, send=no_send))
    if stragglers:
        worst = max(stragglers, key=lambda each: each.waited)
        when = {"start_s": worst.start - run.ledger.t0, "end_s": worst.end - run.ledger.t0}
        evidence = {"ratio": worst.slowdown, "stages": float(len(usual)), **when}
        yield _Without(Root.STRAGGLER, replace(times, compute=usual + within), worst.stage, evidence=evidence)
    if before.any() or within.any():
        gap = np.where(times.follows >= 0, np.maximum(times.gap - before[0], 0.0), times.gap)
        turn, link = np.maximum(times.turn - before, 0.0), np.maximum(times.link - before[1:], 0.0)
        without = replace(times, compute=usual * slowdown, turn=turn, link=link, gap=gap)
        yield _Without(Root.CONTENTION, without)
    late, is_own = replace(times, turn=times.turn.copy(), gap=times.gap.copy()), run.is_explained & ~run.is_idle
    late.turn[0, is_own] = 0.0
    late.gap[is_own & (times.follows >= 0)] = 0.0
    yield _Without(Root.CONTROL, late)


def _expected(run: SpanReplay, usual: Floats) -> Floats:
    """Return content-dependent stage times, [S, N], without the noise in `usual`.

    Each stage keeps its mean time, outliers excepted.
    """
    held = held_by(run.ledger, run.ledger.micro_batches.places(run.numbers))
    levels = np.ones_like(usual)
    for kind in run.kinds:
        levels[:, kind] = np.median(usual[:, kind] / usual[:, kind].mean(axis=0), axis=1)[:, None]
    expected = levels * content_of(usual / levels, held)
    off = np.log(usual / expected)
    off -= np.median(off, axis=1)[:, None]
    is_usual = off <= _OUTLIER * np.median(np.abs(off), axis=1)[:, None] + _ALIKE - 1
    mean: Floats = (usual * is_usual).sum(axis=1) / (expected * is_usual).sum(axis=1)
    return expected * mean[:, None]


def _uneven(
    run: SpanReplay,
    usual: Floats,
    alike: Floats,
    slowdown: Floats,
    within: Floats,
    layers: Sequence[int] | None,
) -> Iterator[_Without]:
    """Yield the run with its slow stages sped up to the others, or with layers spread evenly."""
    stage = int((usual - alike).sum(axis=1).argmax())
    ratio = float(usual[stage].sum() / alike[stage].sum())
    if ratio <= 1.0:
        return
    root, evidence = Root.SLOW_STAGE, {"ratio": ratio, "stages": float(len(usual))}
    if layers is not None and len(layers) == len(usual):
        own = layers[stage] / float(np.delete(layers, stage).mean())
        evidence |= {"layers": layers[stage], "of_layers": sum(layers)}
        if own - 1 >= _BY_LAYERS * (ratio - 1):
            root, alike = Root.UNEVEN_LAYERS, _with_even_layers(usual, run.kinds, np.array(layers, np.float64))
    if root == Root.SLOW_STAGE and stage == len(usual) - 1 and len(run.kinds) == 2:
        prompts, decodes = (float(usual[stage, kind].sum() / alike[stage, kind].sum()) for kind in run.kinds)
        if decodes > _ALIKE and prompts - 1 < min(0.3, 0.5 * (decodes - 1)):
            root, evidence = Root.LM_HEAD, evidence | {"ratio_of_prompts": prompts, "ratio_of_decodes": decodes}
    if root == Root.SLOW_STAGE:
        evidence |= hot_experts(stage, run.record)
    ratios = _by_block((usual - alike)[stage]) / _by_block(usual[stage])
    yield _Without(root, replace(run.times, compute=alike * slowdown + within), stage, ratios, evidence)


def _alike(seconds: Floats) -> Floats:
    """Return the seconds of stages [S, N] with slow stages sped up to the others.

    The others are the stages up to about the lower median of all. A slow stage's ratios to them get the distribution of
    their ratios to each other. So its times keep realistic noise, and a stage that is slow only for some micro-batches
    is found too.
    """
    seconds = np.maximum(seconds, 1e-9)
    levels = np.median(seconds / seconds.mean(axis=0), axis=1)
    is_other = levels <= _ALIKE * np.sort(levels)[(len(levels) - 1) // 2]
    alike = seconds.copy()
    for stage, own in enumerate(seconds):
        others = seconds[is_other & (np.arange(len(seconds)) != stage)]
        usual = others.mean(axis=0) if len(others) else own
        more = own - usual
        if more.mean() <= max(_LEAST_EXCESS * usual.mean(), _SURE * more.std() / len(more) ** 0.5):
            continue
        ratio = np.log(own / usual)
        order = np.argsort(ratio, kind="stable")
        ratio[order] = np.minimum(ratio[order], _symmetric(ratio[order]) if len(others) == 1 else _between(others))
        alike[stage] = usual * np.exp(ratio)
    return alike


def _between(stages: Floats) -> Floats:
    """Return sorted log ratios of each of `stages` [S, N] to the mean of the others, averaged over the stages."""
    total = stages.sum(axis=0)
    ratios = np.sort(np.log(stages * (len(stages) - 1) / (total - stages)), axis=1)
    found: Floats = (ratios - np.median(ratios, axis=1)[:, None]).mean(axis=0)
    return found


def _symmetric(ratios: Floats) -> Floats:
    """Return log ratios [N] of two equally fast stages, from ascending `ratios` of two that may differ.

    Both sides of 0 mirror the ratios below the mode, which is the middle of the densest quarter.
    """
    part = max(2, len(ratios) // 4)
    start = int((ratios[part - 1 :] - ratios[: len(ratios) - part + 1]).argmin())
    below = np.minimum(ratios - ratios[start + part // 2], 0.0)
    half = len(ratios) // 2
    return np.concatenate([below[:half], -below[: len(ratios) - half][::-1]])


def _with_even_layers(seconds: Floats, kinds: Sequence[Bools], layers: Floats) -> Floats:
    """Return the seconds of stages [S, N] with the mean number of layers on each, other compute unchanged."""
    even = seconds.copy()
    for kind in kinds:
        own = seconds[:-1, kind]
        a_layer = float(np.median(own / layers[:-1, None] / seconds[:, kind].mean(axis=0)))
        pairs = [(i, j) for i in range(len(own)) for j in range(i) if layers[i] != layers[j]]
        if pairs:
            each = [(own[i] - own[j]) / (layers[i] - layers[j]) / seconds[:, kind].mean(axis=0) for i, j in pairs]
            a_layer = float(np.median(each))
        moved = (layers - layers.mean())[:, None] * a_layer * seconds[:, kind].mean(axis=0)
        even[:, kind] = np.maximum(seconds[:, kind] - moved, 0.0)
    return even


def _by_block(values: Floats) -> Floats:
    """Return the sums of values [N] over the blocks of a run."""
    return np.array([block.sum() for block in np.array_split(values, _BLOCKS)])
