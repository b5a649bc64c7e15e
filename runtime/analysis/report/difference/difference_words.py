"""The difference of two runs in words: what was changed, its effect on the makespan, and where it shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....core.numbers import counted, percent_text, seconds_text
from ...drawing.formatting import cause_label
from ...ledger.causes import Cause
from ...run_folder.titles import is_simulated
from .makespan_difference import SPEED, STAGES, WAITS, WORK, MakespanDifference
from .run_difference import RunDifference

_COMPUTE_PARTS = {
    WORK: "for other micro-batches",
    SPEED: "for the same micro-batches",
    STAGES: "by the number of stages",
}

_SAME = 5e-4  # largest relative change that counts as unchanged
_WORTH_NAMING = 0.15  # least share of the change for another part to be mentioned
_ALIKE = 0.02  # largest relative change of a stage's speed that counts as unchanged
_MAX_CHANGED = 4  # settings and versions named at most


def part_label(part: str) -> str:
    """Return the display label of a part of the makespan's change, or of a ledger."""
    if part == STAGES:
        return "number of stages"
    return cause_label(Cause(part)) if part in Cause.__members__.values() else part


def signed_text(seconds: float) -> str:
    """Format a change of seconds as `+1.23 s` or `-45.6 ms`."""
    text = seconds_text(abs(seconds))
    return text if text == "0" else f"{'+' if seconds > 0 else '-'}{text}"


def listed(texts: Sequence[str], most: int) -> str:
    """Join the first `most` texts, and append how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def changed_words(difference: RunDifference) -> str:
    """Return a sentence on the settings and versions that differ."""
    simulated = [is_simulated(folder.config) for folder in difference.folders]
    labels = difference.labels if simulated[0] else difference.labels[::-1]
    first = f"{labels[0]} is simulated, {labels[1]} is not. " if simulated[0] != simulated[1] else ""
    if not difference.changed:
        return f"{first}No setting and no version differs."
    return f"{first}What differs: {listed([each.text for each in difference.changed], _MAX_CHANGED)}."


def makespan_words(difference: RunDifference) -> list[str]:
    """Return sentences on the change of the makespan: its origin, and the requests that take longer."""
    found = difference.makespan
    moves = max(map(abs, found.parts.values())) > _SAME * found.base
    sentences = [f"The makespan is {_compared(found.base, found.run)}."]
    sentences += [_origin(found), *_others(found)] if moves else []
    return [*sentences, *_requests(difference)]


def _compared(base: float, run: float) -> str:
    """Compare the seconds of both runs."""
    if abs(run - base) <= _SAME * base:
        return f"the same: {seconds_text(run)}"
    if run - base > base > 0:
        change = f"{run / base:.1f} times as long"
    else:
        share = f" ({percent_text(abs(run - base) / base)})" if base > 0 else ""
        change = f"{seconds_text(abs(run - base))}{share} {'longer' if run > base else 'shorter'}"
    return f"{change}: {seconds_text(run)} against {seconds_text(base)}"


def _amount(seconds: float) -> str:
    return f"{seconds_text(abs(seconds))} {'more' if seconds > 0 else 'less'}"


def _origin(found: MakespanDifference) -> str:
    """Describe the origin of the change."""
    part, stage, seconds = found.origin.part, found.origin.stage, found.origin.seconds
    amount, names = _amount(seconds), found.stage_names[1]
    where = "" if stage is None else f" on {names[stage]}"
    if part == SPEED:
        return _speed(found)
    if part == WORK:
        (before, after), tokens = found.micro_batches, found.tokens
        instead = f" instead of {tokens[0]:,}" if tokens[0] != tokens[1] else ""
        number = f"there are {after:,} instead of {before:,}, for {counted(tokens[1], 'token')}{instead}"
        return f"Its micro-batches take {amount} compute{where}: {number}."
    if part == STAGES:
        before, after = map(len, found.stage_names)
        return f"Its work is spread over {counted(after, 'stage')} instead of {before}: {amount} compute on each."
    where = where and (f", the most{where}" if part in WAITS else f", beginning{where}")
    return f"It has {_other(part, seconds)}{where}."


def _speed(found: MakespanDifference) -> str:
    names, stage, seconds = found.stage_names[1], found.origin.stage, found.origin.seconds
    if stage is None:
        who = "Each stage" if len(found.stage_names[0]) > 1 else "The stage"
        return f"{who} takes {found.slowdown:.2f} times as long for the same micro-batch: {_amount(seconds)} compute."
    text = f"{_capital(names[stage])} takes {found.slowdowns[stage]:.2f} times as long for the same micro-batch"
    text += f": {_amount(seconds)} compute"
    others = [(s, slowdown) for s, slowdown in enumerate(found.slowdowns) if s != stage]
    other, slowdown = max(others, key=lambda pair: abs(pair[1] - 1))
    text += f"; {names[other]} takes {slowdown:.2f} times as long" if abs(slowdown - 1) > _ALIKE else ""
    waits = sum(found.by_stage[s][part] for s, _ in others for part in WAITS)
    return text + (", and the others wait for it." if waits > 0 and seconds > 0 else ".")


def _others(found: MakespanDifference) -> Iterator[str]:
    """Name other parts that matter; waits for the stage where the change originates follow from it."""
    origin = found.origin
    waits_follow = origin.stage is not None and origin.part not in WAITS
    named = {origin.part} | (WAITS if waits_follow else set())
    least = _WORTH_NAMING * max(abs(found.change), abs(origin.seconds))
    large = [part for part, seconds in found.parts.items() if part not in named and abs(seconds) >= least]
    if large:
        large.sort(key=lambda part: -abs(found.parts[part]))
        where = "" if len(found.stage_names[1]) == 1 else ", in the mean of the stages"
        yield f"In addition{where}: {', '.join(_other(part, found.parts[part]) for part in large[:2])}."


def _other(part: str, seconds: float) -> str:
    what = f"compute {_COMPUTE_PARTS[part]}" if part in _COMPUTE_PARTS else f"idle time ({part_label(part)})"
    return f"{_amount(seconds)} {what}"


def _requests(difference: RunDifference) -> Iterator[str]:
    count = len(difference.requests)
    if count < max(difference.num_requests):
        yield f"{count:,} requests have the same number and lengths in both, of {_both(difference.num_requests)}."
    least = [_SAME * each.base.latency for each in difference.requests]
    longer = sum(each.change > some for each, some in zip(difference.requests, least, strict=True))
    shorter = sum(each.change < -some for each, some in zip(difference.requests, least, strict=True))
    if longer or shorter:
        yield f"Of {counted(count, 'request')}, {longer:,} take longer from arrival to last token, {shorter:,} less."
    elif count:
        yield "No request takes longer or less from arrival to last token."


def _both(counts: tuple[int, int]) -> str:
    return f"{counts[0]:,}" if counts[0] == counts[1] else f"{counts[0]:,} and {counts[1]:,}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
