"""The difference of two runs in words: what was changed, what that did, and where it shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.numbers import counted
from ..drawing.formatting import cause_label, ms_text, percent_text, seconds_text
from ..ledger.causes import Cause
from .difference import SPEED, STAGES, WAITS, WORK, MakespanDifference, Origin
from .request_difference import RequestChange
from .run_difference import BASE, RUN, RunDifference
from .run_noise import Noise
from .tail_difference import Latency, TailDifference

LATENCY_NAMES: dict[Latency, str] = {"itl": "P99 TBT", "ttft": "P99 TTFT"}
TAIL_LABELS = {
    "queue": "queued",
    "no_room": "no room",
    "turn": "its turn",
    "kv_transfer": "KV transfer",
    "recovery": "recovery",
    "control": "control",
    "result": "result",
    "unknown": "unknown",
    "wait": "behind others",
    "transport": "transport",
    "compute": "compute",
}
_TAIL_WORDS = {
    "queue": "in the queue behind other requests",
    "no_room": "waiting for room in the KV cache or the batch",
    "turn": "waiting for its turn to be dispatched",
    "kv_transfer": "waiting for its KV from another pipeline",
    "recovery": "waiting for the pipeline's repair",
    "control": "control: the coordinator's own time and its messages",
    "result": "until the result is back",
    "unknown": "not known",
    "wait": "behind other micro-batches on the stages",
    "transport": "transport between stages",
    "compute": "compute of the request's own micro-batch",
}
_PART_LABELS = {WORK: "work", SPEED: "speed", STAGES: "number of stages"}

_SAME = 5e-4  # of the number; less is no change in words
_WORTH_NAMING = 0.15  # of the change, from which on another part has a place in the words
_MANY = 0.3  # of the intervals of a tail, or of the change: a request with so much is named
_MOST = 0.6  # of a part: a stage with so much is named
_OTHER = 0.1  # of a tail's prompt tokens: less are as many
_ALIKE = 0.02  # of a stage's speed: less is as fast
_MAX_CHANGED, _MAX_REQUESTS = 4, 2  # that are named


def part_label(part: str) -> str:
    """Return a part of the makespan's change, or of a ledger, as people read it."""
    if part in _PART_LABELS:
        return _PART_LABELS[part]
    return cause_label(Cause(part)) if part in Cause.__members__.values() else part


def signed_text(seconds: float) -> str:
    """Write a change of seconds as `+1.23 s` or `-45.6 ms`."""
    text = seconds_text(abs(seconds))
    return text if text == "0" else f"{'+' if seconds > 0 else '-'}{text}"


def paragraphs(difference: RunDifference) -> list[list[str]]:
    """Say it in sentences: what was changed; what that did to the makespan, and where; what it did to the tails."""
    found, noise = difference.makespan, difference.makespan_noise
    makespan = [_makespan(found)]
    if _moves(found):
        chance = _noise(difference)
        origin = list(_origin(found))
        makespan += [chance, *origin] if noise is not None and noise.covers else [*origin, chance]
    makespan += _requests(difference)
    names = found.stage_names[1] if found.by_stage else []
    tails = [_tail(LATENCY_NAMES[n], tail, difference.tail_noise(n), names) for n, tail in difference.tails.items()]
    return [[text for text in texts if text] for texts in ([_changed(difference)], makespan, tails)]


def sentences(difference: RunDifference) -> list[str]:
    """Return the sentences of all paragraphs."""
    return [text for texts in paragraphs(difference) for text in texts]


def _changed(difference: RunDifference) -> str:
    base, run = difference.simulated
    simulated, other = (RUN, BASE) if run else (BASE, RUN)
    first = f"{simulated} is simulated, {other} is not. " if base != run else ""
    changed = difference.changed
    if not changed:
        return f"{first}No setting and no version differs."
    texts = [each.text for each in changed[:_MAX_CHANGED]]
    more = f" and {len(changed) - _MAX_CHANGED} more" if len(changed) > _MAX_CHANGED else ""
    return f"{first}What differs: {'; '.join(texts)}{more}."


def _makespan(found: MakespanDifference) -> str:
    base, run = seconds_text(found.base), seconds_text(found.run)
    if abs(found.change) <= _SAME * found.base:
        return f"{RUN} takes as long as {BASE}: {run}."
    if found.change > found.base > 0:
        return f"{RUN} takes {found.run / found.base:.1f} times as long as {BASE}: {run} against {base}."
    share = f" ({percent_text(abs(found.change) / found.base)})" if found.base > 0 else ""
    way = "more" if found.change > 0 else "less"
    return f"{RUN} takes {seconds_text(abs(found.change))}{share} {way} than {BASE}: {run} against {base}."


def _moves(found: MakespanDifference) -> bool:
    return max(map(abs, found.parts.values())) > _SAME * found.base


def _origin(found: MakespanDifference) -> Iterator[str]:
    """Say where the change begins, and which other parts matter."""
    origin = found.origin
    if origin.part == SPEED:
        yield _speed(found, origin)
    elif origin.part == WORK:
        yield _work(found, origin)
    elif origin.part == STAGES:
        yield _stages(found)
    else:
        yield _idle(found, origin)
    waits_follow = origin.stage is not None and origin.part not in WAITS
    named = {origin.part} | (WAITS if waits_follow else set())
    others = {part: seconds for part, seconds in found.parts.items() if part not in named}
    least = _WORTH_NAMING * max(abs(found.change), abs(origin.seconds))
    large = sorted((part for part in others if abs(others[part]) >= least), key=lambda part: -abs(others[part]))
    if large:
        where = "Beside it" if len(found.stage_names[1]) == 1 else "Beside it, in the mean of the stages"
        yield f"{where}: {', '.join(_more_or_less(part, others[part]) for part in large[:2])}."


def _more_or_less(part: str, seconds: float) -> str:
    way = "more" if seconds > 0 else "less"
    if part == SPEED:
        return f"{seconds_text(abs(seconds))} {way} compute for the same micro-batches"
    if part == WORK:
        return f"{seconds_text(abs(seconds))} {way} compute for other micro-batches"
    if part == STAGES:
        return f"{seconds_text(abs(seconds))} {way} by the number of stages"
    return f"{seconds_text(abs(seconds))} {way} idle time ({part_label(part)})"


def _speed(found: MakespanDifference, origin: Origin) -> str:
    amount = f"{seconds_text(abs(origin.seconds))} {'more' if origin.seconds > 0 else 'less'} compute"
    if origin.stage is None:
        who = "Each stage" if len(found.stage_names[0]) > 1 else "The stage"
        return f"{who} takes {found.slowdown:.2f} times as long for the same micro-batch: {amount}."
    name, slowdown = found.stage_names[1][origin.stage], found.slowdowns[origin.stage]
    text = f"{_capital(name)} takes {slowdown:.2f} times as long for the same micro-batch: {amount}"
    others = [(each, s) for s, each in enumerate(found.slowdowns) if s != origin.stage and abs(each - 1) > _ALIKE]
    if others:
        each, stage = max(others, key=lambda pair: abs(pair[0] - 1))
        text += f"; {found.stage_names[1][stage]} takes {each:.2f} times as long"
    waits = sum(found.by_stage[s][part] for s in range(len(found.by_stage)) if s != origin.stage for part in WAITS)
    return text + (", and the others wait for it." if waits > 0 and origin.seconds > 0 else ".")


def _work(found: MakespanDifference, origin: Origin) -> str:
    way = "more" if origin.seconds > 0 else "less"
    before, after = found.micro_batches
    tokens = counted(found.tokens[1], "token") + (
        f" instead of {found.tokens[0]:,}" if len(set(found.tokens)) > 1 else ""
    )
    where = "" if origin.stage is None else f" on {found.stage_names[1][origin.stage]}"
    return (
        f"Its micro-batches take {seconds_text(abs(origin.seconds))} {way} compute{where}: there are {after:,} instead "
        f"of {before:,}, for {tokens}."
    )


def _stages(found: MakespanDifference) -> str:
    before, after = (len(names) for names in found.stage_names)
    seconds = found.parts[STAGES]
    way = "more" if seconds > 0 else "less"
    return (
        f"Its work is spread over {counted(after, 'stage')} instead of {before}: "
        f"{seconds_text(abs(seconds))} {way} compute on each."
    )


def _idle(found: MakespanDifference, origin: Origin) -> str:
    way = "more" if origin.seconds > 0 else "less"
    agrees = (origin.seconds > 0) == (found.change > 0) and abs(found.change) >= abs(origin.seconds)
    amount = seconds_text(abs(origin.seconds))
    name = part_label(origin.part)
    first = f"{amount} of that is idle time ({name})" if agrees else f"There is {amount} {way} idle time ({name})"
    if origin.stage is None:
        return f"{first}."
    where = found.stage_names[1][origin.stage]
    return f"{first}, the most on {where}." if origin.part in WAITS else f"{first}, beginning on {where}."


def _requests(difference: RunDifference) -> Iterator[str]:
    requests = difference.requests
    if not requests.by_id:
        yield "The two served other requests; these are compared by length."
        return
    for where, only in ((RUN, requests.only_run), (BASE, requests.only_base)):
        if only:
            ranked = sorted(only, key=lambda each: -abs(each.change))
            named = "; ".join(map(_request, ranked[:_MAX_REQUESTS]))
            more = f"; and {len(only) - _MAX_REQUESTS} more" if len(only) > _MAX_REQUESTS else ""
            yield f"Only in {where}: {named}{more}."
    change = difference.makespan.change
    most = max(requests.changes, key=lambda each: each.change * (1 if change > 0 else -1))
    if most.requests == (1, 1) and abs(most.change) > _MANY * abs(change) and _moves(difference.makespan):
        yield f"{_capital(most.name)} alone has {signed_text(most.change)}."


def _request(change: RequestChange) -> str:
    prompt, output = change.tokens
    return f"{change.name} ({prompt:,} prompt and {output:,} output tokens), {seconds_text(abs(change.change))}"


def _noise(difference: RunDifference) -> str:
    """Say whether the difference may be chance."""
    noise = difference.makespan_noise
    if noise is None:
        return (
            "" if difference.is_exact else "One run of each does not show what varies from run to run: repeats=5 does."
        )
    ranges = " and ".join(
        f"{name} {seconds_text(max(0.0, low))} to {seconds_text(high)}"
        for name, (low, high) in ((BASE, noise.base), (RUN, noise.run))
    )
    within = "may be chance" if noise.covers else "is more than chance"
    return f"The difference {within}: by its repeats, a run varies so far: {ranges}."


def _tail(name: str, found: TailDifference, noise: Noise | None, stage_names: Sequence[str]) -> str:
    base, run = ms_text(found.base.seconds * 1e3), ms_text(found.run.seconds * 1e3)
    if abs(found.change) <= _SAME * found.base.seconds:
        return f"{name} is the same: {run}."
    before = found.base.seconds
    if found.change > before > 0:
        change = f"{found.run.seconds / before:.1f} times as long"
    else:
        share = f" ({percent_text(abs(found.change) / before)})" if before > 0 else ""
        change = f"{ms_text(abs(found.change) * 1e3)}{share} {'longer' if found.change > 0 else 'shorter'}"
    sign = 1 if found.change > 0 else -1
    part = max(found.parts, key=lambda each: sign * found.parts[each])
    stage = _tail_stage(found, part, sign, stage_names)
    chance = ", which may be chance" if noise is not None and noise.covers else ""
    return (
        f"{name} is {change}{chance}: {run} against {base}; {ms_text(abs(found.parts[part]) * 1e3)} of the change is "
        f"{_TAIL_WORDS[part]}{stage}{_held(found, part)}.{_beside(found)}"
    )


def _beside(found: TailDifference) -> str:
    """Name the prompt whose chunks many intervals of the run's tail end with, but not of the base's."""
    if found.change <= 0 or not found.run.prompts or len(found.run.requests) < 2:
        return ""
    request, count = found.run.prompts[0]
    share = count / found.run.intervals
    if share <= _MANY or dict(found.base.prompts).get(request, 0) / found.base.intervals > share / 2:
        return ""
    return f" {share:.0%} of these intervals share their micro-batch with the prompt of request {request}."


def _tail_stage(found: TailDifference, part: str, sign: int, names: Sequence[str]) -> str:
    """Name the stage that has most of a part, where one has more than half."""
    seconds = [sign * parts[part] for parts in found.by_stage if part in parts]
    if len(seconds) < 2 or not names or max(seconds) < _MOST * sum(map(abs, seconds)):
        return ""
    return f", most of it on {names[seconds.index(max(seconds))]}"


def _held(found: TailDifference, part: str) -> str:
    """Say how the micro-batches of the tails differ, where they do and compute grew or shrank."""
    before, after = found.base.prefill, found.run.prefill
    if part != "compute" or abs(after - before) <= _OTHER * max(before, after):
        return ""
    return f", which holds {after:,.0f} prompt tokens instead of {before:,.0f}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
