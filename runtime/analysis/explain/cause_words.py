"""A run in words: what costs it most and what undoes that, then how sure this is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..core.numbers import counted
from ..drawing.formatting import cause_label, percent_text, seconds_text
from ..ledger.causes import Cause
from .explanation import METRIC_NAMES
from .roots import Root
from .run_words import RunWords
from .sized_cause import SizedCause

_NAMED_IDLE = 0.02  # of stage time, from which on an idle time of a healthy run is named
_MOST_NAMED = 2
_ALONE = 1.5  # requests that run at a time, below which a run is of single requests
_UNSURE = 0.25  # of the metric by which a replay is off, from which on it cannot tell that nothing costs much
_EXACT = 0.001  # of the metric: a narrower range is not worth a sentence
_RATIOS = ("ratio", "expert_load", "expert_load_of_others")
_LEAST_THINK = 0.001  # seconds between an answer and a client's next request


def sentences(
    causes: Sequence[SizedCause],
    idle: Mapping[Cause, float],
    *,
    metric: str,
    value: float,
    error: float | None = None,
    left: Sequence[str] = (),
    about: RunWords | None = None,
    running: float = 0.0,
    is_ours: bool = True,
) -> list[str]:
    """Say what costs a run most and what undoes it, and then how sure that is.

    Args:
        causes: that are worth mending, the largest first.
        idle: shares of stage time by the ledger's causes.
        metric: by which causes are sized, of `METRICS`.
        value: the run's own, in seconds.
        error: of the replay of the run as it was: replayed / measured - 1; None: the spans themselves were replayed.
        left: causes for which no time was left.
        about: the run's config.
        running: requests that ran at a time, in the mean.
        is_ours: whether gapless ran it, so that its keys can make a change.
    """
    about = about or RunWords({})
    if not causes and left:
        busy = percent_text(1 - sum(idle.values()))
        return [f"{busy} busy; there was no time to look for {_listed(left)}: gapless explain takes longer (seconds)."]
    if not causes:
        if error is not None and abs(error) >= _UNSURE:
            off = f"a replay of the run is off by {percent_text(abs(error))} of its {METRIC_NAMES[metric]}"
            return [_healthy(idle, running, f"No cause is sure, as {off}")]
        return [_healthy(idle, running)]
    first, *others = causes

    def said(cause: SizedCause) -> str:
        return f"{_cost(cause, metric, value, about)}{_change(cause, is_ours=is_ours)}."

    lines = [_capital(said(first))]
    sure = ["The size is the run less its replay without that cause"]
    if first.high - first.low > _EXACT * value:
        sure.append(f"nine of ten outcomes lie within {range_text(first)}")
    if error is not None and abs(error) >= _EXACT:
        sure.append(f"the replay of the run as it was is {percent_text(abs(error))} off")
    lines.append(f"{'; '.join(sure)}.")
    if others:
        lines.append(f"Next: {said(others[0])}")
    return [*lines, *_unsure(left)]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def cause_name(cause: SizedCause) -> str:
    """Name a cause for a table, with its stage."""
    name = _WORDS[cause.cause].name
    if cause.stage is None:
        return name
    if cause.cause == Root.TRANSPORT:
        return f"{name}, most after stage {cause.stage}"
    return f"{name} {cause.stage}" if name.endswith("stage") else f"{name} on stage {cause.stage}"


def causes_listed(causes: Sequence[SizedCause]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the heads and rows of the list of causes, without columns that would be empty."""
    heads: tuple[str, ...] = ("cause", "costs", "of the run", "nine of ten", "change", "saves")
    rows = [
        (
            cause_name(each),
            seconds_text(each.seconds),
            percent_text(each.share),
            range_text(each),
            each.change,
            seconds_text(each.saves_seconds) if each.change else "",
        )
        for each in causes
    ]
    shown = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    return tuple(heads[place] for place in shown), [tuple(row[place] for place in shown) for row in rows]


def range_text(cause: SizedCause) -> str:
    """Write the range of what a cause costs; empty where it has none."""
    return "" if cause.low == cause.high else f"{seconds_text(cause.low)} to {seconds_text(cause.high)}"


def part_text(seconds: float) -> str:
    """Write the stage-seconds that come from a cause; negative where there is more idle time without it."""
    return seconds_text(seconds) if seconds >= 0 else f"-{seconds_text(-seconds)}"


def _cost(cause: SizedCause, metric: str, value: float, about: RunWords) -> str:
    words = _WORDS[cause.cause]
    shown = cause.says or words.detail(cause.evidence, about)
    text = cause_name(cause) + (f" ({shown})" if shown else "")
    text = f"{cause.where}, {text}" if cause.where else text
    of = "" if metric == "duration" else f" of {METRIC_NAMES[metric]}"
    amount = f"{seconds_text(cause.seconds)} of {seconds_text(value)}{of} ({percent_text(cause.share)})"
    at_most = "" if cause.low > 0 else " at most"
    return f"{text} {'cost' if words.is_several else 'costs'}{at_most} {amount}"


def _change(cause: SizedCause, *, is_ours: bool) -> str:
    if not cause.change:
        advice = _WORDS[cause.cause].advice
        advice = advice if is_ours else re.sub(r" \([^)]*\)", "", advice)
        return f"; {advice}" if advice else ""
    note = f", but {cause.note}" if cause.note else ""
    return f"; {cause.change} saves {seconds_text(cause.saves_seconds)}{note}"


def _unsure(left: Sequence[str]) -> list[str]:
    if not left:
        return []
    return [f"No time was left to replay it without {_listed(left)} (seconds)."]


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _healthy(idle: Mapping[Cause, float], running: float, finding: str = "Nothing to mend") -> str:
    busy = 1 - sum(idle.values())
    text = f"{finding}: {percent_text(busy)} busy"
    largest = max(idle, key=lambda cause: idle[cause], default=None)
    if 0 < running < _ALONE and busy < 1 - _NAMED_IDLE and largest == Cause.STARVED_IN_FLIGHT:
        return f"{text}, as one request at a time cannot fill the stages."
    named = sorted((each for each in idle.items() if each[1] >= _NAMED_IDLE), key=lambda each: -each[1])[:_MOST_NAMED]
    if not named:
        return f"{text}."
    rest = " and ".join(f"{_REST.get(cause, cause_label(cause))} ({percent_text(share)})" for cause, share in named)
    return f"{text}; the rest is mostly {rest}."


_REST = {
    Cause.FILL_DRAIN: "the run's start and end",
    Cause.STARVED_NO_REQUEST: "time without requests",
    Cause.STARVED_IN_FLIGHT: "the tail, when few requests were left",
}


def _few(value: float) -> str:
    if value >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _shown(evidence: Mapping[str, float], about: RunWords) -> dict[str, str]:
    """Return the numbers that details may hold, as text."""
    shown = {name: f"{value:.2g}" if name in _RATIOS else _few(value) for name, value in evidence.items()}
    for name, unit in (("preemptions", "preemption"), ("faults", "fault")):
        if number := round(evidence.get(name, 0)):
            shown[f"all_{name}"] = counted(number, unit)
    if evidence.get("think_s", 0.0) > _LEAST_THINK:
        shown["think"] = seconds_text(evidence["think_s"])
    if "tokens_per_s" in evidence and about.token_bytes is not None:
        shown["link"] = f"{_few(evidence['tokens_per_s'] * about.token_bytes / 1e9)} GB/s"
    return shown | ({"policy": about.policy} if about.policy else {})


class _Words(NamedTuple):
    """The name of a root, what shows it, each where its numbers are known, and what helps where no key undoes it."""

    name: str
    details: tuple[str, ...] = ()
    advice: str = ""
    is_several: bool = False

    def detail(self, evidence: Mapping[str, float], about: RunWords) -> str:
        """Write what shows the cause; empty where nothing does."""
        shown, found = _shown(evidence, about), []
        for each in self.details:
            with suppress(KeyError):
                found.append(each.format_map(shown))
        return ", ".join(found)


_SLOW = (
    "{ratio} times the others' time",
    "as its busiest experts get {expert_load} times the mean of tokens ({expert_load_of_others} times on the others)",
    "most often expert {hot_expert} of layer {hot_layer}",
)
_KV_CACHE = _Words(
    "a small KV cache", ("{blocks} blocks", "{all_preemptions}"), "more memory for the KV cache would help"
)
_WORDS = {
    Root.SLOW_STAGE: _Words(
        "a slow stage", _SLOW, "fewer layers on it (parallel.layers) or a device like the others' would help"
    ),
    Root.UNEVEN_LAYERS: _Words("uneven layers", ("{layers} of {of_layers}",), "", True),
    Root.LM_HEAD: _Words("the LM head", _SLOW, "fewer layers on it (parallel.layers) would help"),
    Root.STRAGGLER: _Words(
        "a straggler",
        ("{ratio} times its usual time from {start_s} s to {end_s} s",),
        "look at what else its device did then",
    ),
    Root.CHANCE: _Words("stage times that vary", (), "devices without other work would help", True),
    Root.MICRO_BATCHES: _Words("micro-batches that differ", (), "", True),
    Root.POLICY: _Words("the policy", ("{policy}",)),
    Root.DEPTH: _Words("few micro-batches in flight", ("{depth} at most",), "", True),
    Root.TRANSPORT: _Words("slow links", ("{link}",), "a faster link would help", True),
    Root.CONTROL: _Words("late dispatches", (), "a core of its own for the coordinator would help", True),
    Root.FEW_REQUESTS: _Words(
        "few clients", ("{clients} unfinished at most", "each after {think}"), "more requests at once would help", True
    ),
    Root.KV_FULL: _KV_CACHE,
    Root.PREEMPTION: _KV_CACHE,
    Root.RECOVERY: _Words("recovery", ("{all_faults}",), "spare ranks shorten it (parallel.spares)"),
    Root.OVERLOAD: _Words(
        "overload",
        ("{arrived_per_s} requests/s arrive", "{served_per_s} are served"),
        "fewer requests/s or more devices would help",
    ),
    Root.SMALL_CHUNK: _Words("small chunks", ("{tokens} tokens",), "", True),
    Root.LARGE_CHUNK: _Words("large chunks", ("{tokens} tokens",), "", True),
    Root.SMALL_BATCH: _Words("small micro-batches", ("{batch} requests at most",), "", True),
    Root.TENSOR_PARALLEL: _Words("tensor parallelism across nodes"),
    Root.LONG_PROMPTS: _Words(
        "long prompts among short ones",
        ("{prompts} of {tokens} tokens", "the usual has {usual}"),
        "a pool of their own would help",
        True,
    ),
    Root.CONTENTION: _Words("processor contention", (), "cores of its own for each rank would help (parallel.threads)"),
    Root.SLOW_COMPUTE: _Words("slow compute"),
}
