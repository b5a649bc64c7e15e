"""Sizes causes by replays of a run's recorded spans (`span_times.py`): the run less its replay without the cause.

For runs without a simulated twin: traces from other engines, replicas of a fleet, windows of a server. The contents of
micro-batches stay as recorded, so causes that change them (a pipeline depth below the number of stages) have no size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import msgspec
import numpy as np

from ..core.micro_batch_columns import Floats, Ints, values_at
from ..core.run_record import MicroBatchRecord, RunRecord, Wait
from ..core.student import t_quantile
from ..ledger.ledger import Ledger
from ..ledger.stragglers import Straggler, find_stragglers
from .hot_experts import hot_experts
from .roots import Root
from .sized_cause import COMPUTE, SizedCause
from .span_times import Bools, Times, times_of

_LEAST_SHARE = 0.03  # of the duration: less is not worth removing
_LEAST_OF_A_KIND = 8  # micro-batches
_ALIKE = 1.05  # times the lower median of the stages, up to which a stage counts as one of the others
_LEAST_EXCESS = 0.02  # of a stage's time over the others'
_BY_LAYERS = 0.5  # of a stage's longer time, that its layers explain, from which on they are the root
_BLOCKS = 8  # of a run, over which a cause varies
_OUTSIDE = 0.1  # of outcomes, outside a cause's range
_MODEL_ERROR = 0.03  # of a size


@dataclass(frozen=True, slots=True)
class _Without:
    """The run's times without a cause.

    Attributes:
        root, stage, evidence: as in `SizedCause`.
        times: to replay.
        ratios: what goes of what there was, by block of the run.
    """

    root: Root
    times: Times
    ratios: Floats
    stage: int | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)


def replayed_spans(
    record: RunRecord,
    ledger: Ledger,
    layers: Sequence[int] | None = None,
    stragglers: Sequence[Straggler] | None = None,
) -> list[SizedCause]:
    """Return the causes that cost more than 3% of a run's duration, the largest first.

    Args:
        record: of the run.
        ledger: of the same record.
        layers: of each stage, if known.
        stragglers: of the run, if they have been searched for.
    """
    found = times_of(record, ledger)
    if found is None or ledger.span_seconds <= 0:
        return []
    times, places = found
    run = _Run(record, ledger, times, places, *times.replay())
    stragglers = find_stragglers(ledger) if stragglers is None else stragglers
    causes = []
    for without in _without(run, layers, stragglers):
        begins, ends = without.times.replay()
        seconds = float(run.ends.max() - ends.max())
        spread = without.ratios.std(ddof=1) / _BLOCKS**0.5 / max(1e-9, float(without.ratios.mean()))
        off = seconds * (t_quantile(_OUTSIDE, _BLOCKS - 1) * float(spread) + _MODEL_ERROR)
        if seconds < _LEAST_SHARE * ledger.span_seconds or seconds <= off:
            continue
        causes.append(
            SizedCause(
                without.root,
                seconds,
                seconds - off,
                seconds + off,
                seconds / ledger.span_seconds,
                without.stage,
                run.shows(begins, ends),
                without.evidence,
            )
        )
    return sorted(causes, key=lambda each: -each.seconds)


@dataclass(frozen=True, slots=True)
class _Run:
    record: RunRecord
    ledger: Ledger
    times: Times
    places: Sequence[Ints]
    begins: Floats
    ends: Floats

    @property
    def numbers(self) -> Ints:
        """The micro-batches that are replayed."""
        return self.ledger.lanes[0].micro_batch[self.places[0]]

    @property
    def kinds(self) -> list[Bools]:
        """Masks of the micro-batches with prompt tokens and of those without; one for all where there are few."""
        held = self.ledger.micro_batches
        has_prompt = values_at(held.prefill, held.places(self.numbers)) > 0
        few = min(has_prompt.sum(), (~has_prompt).sum()) < _LEAST_OF_A_KIND
        return [np.ones(len(has_prompt), bool)] if few else [has_prompt, ~has_prompt]

    def shows(self, begins: Floats, ends: Floats) -> dict[str, float]:
        """Return the stage-seconds that a replay has less, by the ledger's causes, and of compute."""
        is_whole = sum(map(len, self.places)) == len(self.record.spans)
        before = self.ledger if is_whole else Ledger(self._with(self.begins, self.ends))
        after = Ledger(self._with(begins, ends))
        idle, left = before.seconds_by_cause(), after.seconds_by_cause()
        found = {str(cause): idle[cause] - left[cause] for cause in idle}
        return {COMPUTE: before.busy_seconds() - after.busy_seconds(), **found}

    def _with(self, begins: Floats, ends: Floats) -> RunRecord:
        """Return the record with the spans of a replay, and with waits of stage 0 that fit them."""
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
        old = (np.append(self.begins[0, :1], was[0, :-1]).tolist(), self.begins[0].tolist())
        new = (np.append(begins[0, :1], ends[0, :-1]).tolist(), began[0])
        later = (ends[-1] - was[-1]).tolist()
        batches = []
        for each in self.record.micro_batches:
            if (at := row.get(each.micro_batch)) is not None:
                waits = _moved(each, old[0][at], old[1][at], new[0][at], new[1][at])
                done = None if each.completed is None else each.completed + later[at]
                batches.append(msgspec.structs.replace(each, waits=waits, completed=done))
        opened, closed = self.record.window
        closed = None if closed is None else closed + float(ends.max() - was.max())
        return replace(self.record, spans=spans, micro_batches=batches, window=(opened, closed))


def _moved(each: MicroBatchRecord, start: float, end: float, new_start: float, new_end: float) -> list[Wait]:
    """Return the waits of a gap of stage 0, scaled to its new length. The time between the last one and `end` stays."""
    over = min(max(each.waits[-1].end, start), end) if each.waits else start
    new_over = max(new_start, new_end - (end - over))
    if over <= start:
        return [Wait(new_start, new_over, each.waits[-1].reason if each.waits else "depth_full")]
    scale = (new_over - new_start) / (over - start)
    return [
        Wait(new_start + (wait.start - start) * scale, new_start + (wait.end - start) * scale, wait.reason)
        for wait in each.waits
    ]


def _without(run: _Run, layers: Sequence[int] | None, stragglers: Sequence[Straggler]) -> Iterator[_Without]:
    """Yield the run's times without each cause."""
    times = run.times
    slowdown = np.ones_like(times.compute)
    for each in stragglers:
        slow = (run.begins[each.stage] >= each.start) & (run.begins[each.stage] < each.end)
        slowdown[each.stage, slow] = each.slowdown
    usual = times.compute / slowdown
    if len(usual) > 1:
        yield from _uneven(run, usual, slowdown, layers)
    yield _Without(
        Root.TRANSPORT,
        replace(times, link=np.zeros_like(times.link), send=np.zeros_like(times.send)),
        np.ones(_BLOCKS),
    )


def _uneven(run: _Run, usual: Floats, slowdown: Floats, layers: Sequence[int] | None) -> Iterator[_Without]:
    """Yield the run with stages that take what the others take, or with layers spread evenly."""
    alike = usual.copy()
    for kind in run.kinds:
        alike[:, kind] = _alike(usual[:, kind])
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
    elif stage == len(usual) - 1 and len(run.kinds) == 2:
        prompts, decodes = (float(usual[stage, kind].sum() / alike[stage, kind].sum()) for kind in run.kinds)
        if decodes > _ALIKE and prompts - 1 < min(0.3, 0.5 * (decodes - 1)):
            root, evidence = Root.LM_HEAD, evidence | {"ratio_of_prompts": prompts, "ratio_of_decodes": decodes}
    if root == Root.SLOW_STAGE:
        evidence |= hot_experts(stage, run.record)
    ratios = _by_block((usual - alike)[stage]) / _by_block(usual[stage])
    yield _Without(root, replace(run.times, compute=alike * slowdown), ratios, stage, evidence)


def _alike(seconds: Floats) -> Floats:
    """Return the seconds of stages [S, N] with those of slow ones as if they took what the others take.

    Others are those that take no more than the lower median of all stages. A slow stage's ratios to them get the
    spread that most have, around one: so what it takes stays as noisy, and micro-batches that it is slow for only at
    times are found too.
    """
    seconds = np.maximum(seconds, 1e-9)
    levels = np.median(seconds / seconds.mean(axis=0), axis=1)
    is_other = levels <= _ALIKE * np.sort(levels)[(len(levels) - 1) // 2]
    alike, count = seconds.copy(), seconds.shape[1]
    normal = np.array([NormalDist().inv_cdf((rank + 0.5) / count) for rank in range(count)])
    for stage, own in enumerate(seconds):
        others = is_other & (np.arange(len(seconds)) != stage)
        if not others.any():
            continue
        usual = seconds[others].mean(axis=0)
        if own.sum() <= (1 + _LEAST_EXCESS) * usual.sum():
            continue
        ratio = np.log(own / usual)
        order = np.argsort(ratio, kind="stable")
        part = max(2, count // 4)
        spread = float((ratio[order[part - 1 :]] - ratio[order[: count - part + 1]]).min()) / 0.637
        ratio[order] = np.minimum(ratio[order], spread * normal)
        alike[stage] = usual * np.exp(ratio)
    return alike


def _with_even_layers(seconds: Floats, kinds: Sequence[Bools], layers: Floats) -> Floats:
    """Return the seconds of stages [S, N] with the mean number of layers on each, whatever else they compute."""
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
    """Return the sums of values [N] over blocks of a run."""
    return np.array([block.sum() for block in np.array_split(values, _BLOCKS)])
