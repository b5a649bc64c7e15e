"""The stages' waits for each other, split by three causes.

These are stages that differ, times that vary by chance, and micro-batches that differ.

All stages compute the same micro-batches: what a micro-batch holds shows on each of them, and a stage that is slower
shows beside the others. The waits are those of a pipeline in lockstep: in round r stage s computes micro-batch r - s,
and the longest of these ends the round. They are added up four times: with the measured times, then without chance,
then without the times in which a stage was slow for a while, then with equal stages. What each step takes away is the
part of what it leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..core.micro_batch_columns import Floats, Ints, values_at
from ..ledger.ledger import Ledger
from ..ledger.stragglers import Straggler, common_places

_LEAST = 8  # micro-batches that all stages computed
_LEAST_OF_A_KIND = 4


@dataclass(frozen=True, slots=True)
class StageBalance:
    """Times of the stages beside each other, and the waits of a pipeline in lockstep, in seconds by stage.

    Attributes:
        usual: compute seconds, without chance and without times in which a stage was slow for a while.
        ratio_of_prompts, ratio_of_decodes: a stage's time for a micro-batch over the mean of all stages, in the median
            of those with prompt tokens and of those without; None where there are too few.
        uneven: waits for stages that take longer than others throughout.
        slow: for those that were slow for a while.
        chance: for those that by chance took longer than usual for a micro-batch.
        content: for micro-batches that take longer than others on every stage.
        excess: what chance adds to a stage's compute.
    """

    usual: Floats
    ratio_of_prompts: Floats | None
    ratio_of_decodes: Floats | None
    uneven: Floats
    slow: Floats
    chance: Floats
    content: Floats
    excess: Floats


def balance_of(ledger: Ledger, stragglers: Sequence[Straggler]) -> StageBalance | None:
    """Compare the stages of a run; None of a single stage, and where they computed too few micro-batches.

    Args:
        ledger: the run's.
        stragglers: the run's, as `find_stragglers` finds them.
    """
    lanes = [lane for lane in ledger.lanes if len(lane.row)]
    if len(lanes) < 2 or len(lanes) < ledger.num_stages:
        return None
    places = common_places(lanes)
    if len(places[0]) < _LEAST:
        return None
    seconds = np.stack([lane.seconds[place] for lane, place in zip(lanes, places, strict=True)])
    begin = np.stack([lane.begin[place] for lane, place in zip(lanes, places, strict=True)])
    of_run = ledger.micro_batches.places(lanes[0].micro_batch[places[0]])
    has_prompt = values_at(ledger.micro_batches.prefill, of_run) > 0
    slowdown = np.ones_like(seconds)
    for each in stragglers:
        slowdown[each.stage, (begin[each.stage] >= each.start) & (begin[each.stage] < each.end)] = each.slowdown
    usual = seconds / slowdown
    factor, of_kind = np.ones_like(seconds), []
    for is_kind in (has_prompt, ~has_prompt):
        ratio = _ratio(usual[:, is_kind]) if is_kind.sum() >= _LEAST_OF_A_KIND else None
        of_kind.append(ratio)
        factor[:, is_kind] = (_ratio(usual) if ratio is None else ratio)[:, None]
    content = content_of(usual / factor, held_by(ledger, of_run))
    waits = [_lockstep(seconds), _lockstep(factor * slowdown * content), _lockstep(factor * content)]
    equal = _lockstep(np.broadcast_to(factor.mean(axis=0) * content, seconds.shape))
    parts = [np.maximum(0.0, more - less) for more, less in zip(waits, [*waits[1:], equal], strict=True)]
    expected = factor * content
    excess = np.maximum(0.0, usual - expected).sum(axis=1)
    return StageBalance(expected.sum(axis=1), of_kind[0], of_kind[1], parts[2], parts[1], parts[0], equal, excess)


def _ratio(seconds: Floats) -> Floats:
    """Return the median over micro-batches of a stage's time over the mean of all stages, [stages]."""
    mean = seconds.mean(axis=0)
    ratio: npt.NDArray[np.float64] = np.median(seconds / np.where(mean > 0, mean, 1.0), axis=1)
    return np.maximum(ratio, 1e-9)


def held_by(ledger: Ledger, of_run: Ints) -> Floats:
    """Return what micro-batches hold that their times are about linear in, [N, features]."""
    held = ledger.micro_batches
    columns = (held.tokens, held.prefill, held.decodes, held.context, held.chunk_prefix)
    return np.column_stack([np.ones(len(of_run)), *(values_at(column, of_run) for column in columns)])


def content_of(seconds: Floats, held: Floats) -> Floats:
    """Return what micro-batches take by what they hold, [N], of times that differ by stage only by chance [stages, N].

    It is a fit to `held`, and of the rest what the stages share: times that vary together vary by content, as far as
    their covariance says so. Of a micro-batch's times the lower median counts, as chance lengthens.
    """
    num_stages = len(seconds)
    seconds = np.maximum(seconds, 1e-9)
    low = np.sort(seconds, axis=0)[(num_stages - 1) // 2]
    scaled = held / np.maximum(held.max(axis=0), 1.0) / low[:, None]
    factors, *_ = np.linalg.lstsq(scaled, np.ones(len(low)), rcond=None)
    fit = np.clip(scaled @ factors, 0.25, 4.0) * low
    rest = np.clip(np.log(seconds / fit), -1.0, 1.0)
    rest -= rest.mean(axis=1, keepdims=True)
    own = float(rest.var(axis=1).mean())
    shared = (float(rest.sum(axis=0).var()) - num_stages * own) / (num_stages * (num_stages - 1))
    shared = min(own, max(0.0, shared))
    weight = shared / (shared + (own - shared) / num_stages) if own > 0 else 1.0
    common = np.log(low / fit)
    content: Floats = fit * np.exp(weight * (common - common.mean()) + common.mean())
    return content


def _lockstep(seconds: Floats) -> Floats:
    """Return each stage's waits between its first and last micro-batch, where stages take `seconds` [stages, N]."""
    num_stages, count = seconds.shape
    rounds = np.zeros((num_stages, count + num_stages - 1))
    for stage, row in enumerate(seconds):
        rounds[stage, stage : stage + count] = row
    longest = np.append(0.0, np.cumsum(rounds.max(axis=0)))
    first = np.arange(num_stages)
    waits: Floats = longest[first + count] - longest[first] - seconds.sum(axis=1)
    return waits
