"""A run in words: what costs it most, what fixes it, and how certain this is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ...core.numbers import counted, percent_text, seconds_text
from ..drawing.formatting import cause_label
from ..ledger.causes import Cause
from .explanation import METRIC_NAMES
from .roots import Root
from .run_words import RunWords
from .sized_cause import SizedCause

_NAMED_IDLE = 0.02  # least share of stage time for an idle cause of a healthy run to be named
_MOST_NAMED = 2
_ALONE = 1.5  # fewer mean running requests than this count as one at a time
_UNSURE = 0.25  # least relative replay error at which the absence of causes is inconclusive
_EXACT = 0.001  # least share of the metric for an interval or error to be mentioned
_RATIOS = ("ratio", "expert_load", "expert_load_of_others")
_LEAST_THINK = 0.001  # least think time to be mentioned, in seconds


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
    """Describe what costs a run most, what fixes it, and how certain that is.

    Args:
        causes: worth fixing, largest first.
        idle: shares of stage time by the ledger's causes.
        metric: the metric by which causes are sized, one of `METRICS`.
        value: the run's own value, in seconds.
        error: error of the unchanged run's replay, replayed / measured - 1; None: the spans themselves were replayed.
        left: causes skipped for lack of time.
        about: the run's config.
        running: mean number of running requests.
        is_ours: whether gapless ran it, so that advice can name its keys.
    """
    about = about or RunWords({})
    if not causes and left:
        busy = percent_text(1 - sum(idle.values()))
        return [f"Stages were {busy} busy. Not checked for lack of time: {_listed(left)}; try gapless explain."]
    if not causes:
        if error is not None and abs(error) >= _UNSURE:
            off = f"the replay of the unchanged run is off by {percent_text(abs(error))} in {METRIC_NAMES[metric]}"
            return [_healthy(idle, running, f"No cause is certain, since {off}")]
        return [_healthy(idle, running)]
    first, *others = causes

    def said(cause: SizedCause) -> str:
        return f"{_cost(cause, metric, value, about)}{_change(cause, is_ours=is_ours)}."

    lines = [_capital(said(first))]
    certain = ["The cost is the run minus a replay without the cause."]
    if first.high - first.low > _EXACT * value:
        certain.append(f"Its 90% interval is {range_text(first)}.")
    if error is not None and abs(error) >= _EXACT:
        certain.append(f"The replay of the unchanged run is off by {percent_text(abs(error))}.")
    lines.append(" ".join(certain))
    if others:
        lines.append(f"Next: {said(others[0])}")
    if left:
        lines.append(f"Not checked for lack of time (seconds): {_listed(left)}.")
    return lines


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def cause_name(cause: SizedCause) -> str:
    """Return the name of a cause for a table, with its stage."""
    name = _WORDS[cause.cause].name
    if cause.stage is None:
        return name
    if cause.cause == Root.TRANSPORT:
        return f"{name}, mostly after stage {cause.stage}"
    return f"{name} {cause.stage}" if name.endswith("stage") else f"{name} on stage {cause.stage}"


def causes_listed(causes: Sequence[SizedCause]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headers and rows of the list of causes, without empty columns."""
    heads: tuple[str, ...] = ("cause", "costs", "of the run", "90% interval", "change", "saves")
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
    """Format the 90% interval of a cause's cost; empty if it has none."""
    return "" if cause.low == cause.high else f"{seconds_text(cause.low)} to {seconds_text(cause.high)}"


def part_text(seconds: float) -> str:
    """Format the idle stage-seconds due to a cause; negative if there is more idle time without it."""
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


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _healthy(idle: Mapping[Cause, float], running: float, finding: str = "No cause worth fixing") -> str:
    busy = 1 - sum(idle.values())
    text = f"{finding}: stages were {percent_text(busy)} busy"
    largest = max(idle, key=lambda cause: idle[cause], default=None)
    if 0 < running < _ALONE and busy < 1 - _NAMED_IDLE and largest == Cause.STARVED_IN_FLIGHT:
        return f"{text}. A single request at a time cannot fill the pipeline."
    named = sorted((each for each in idle.items() if each[1] >= _NAMED_IDLE), key=lambda each: -each[1])[:_MOST_NAMED]
    if not named:
        return f"{text}."
    rest = " and ".join(f"{_REST.get(cause, cause_label(cause))} ({percent_text(share)})" for cause, share in named)
    return f"{text}; the rest is mostly {rest}."


_REST = {
    Cause.FILL_DRAIN: "the run's start and end",
    Cause.STARVED_NO_REQUEST: "time without requests",
    Cause.STARVED_IN_FLIGHT: "the tail of the run, with few requests left",
}


def _few(value: float) -> str:
    if value >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _shown(evidence: Mapping[str, float], about: RunWords) -> dict[str, str]:
    """Return the values available to detail templates, as text."""
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
    """Name of a root, templates of its evidence, and advice if no key fixes it."""

    name: str
    details: tuple[str, ...] = ()
    advice: str = ""
    is_several: bool = False

    def detail(self, evidence: Mapping[str, float], about: RunWords) -> str:
        """Format the evidence of the cause; templates with unknown values are left out."""
        shown, found = _shown(evidence, about), []
        for each in self.details:
            with suppress(KeyError):
                found.append(each.format_map(shown))
        return ", ".join(found)


_SLOW = (
    "{ratio}x the other stages' time",
    "its busiest experts get {expert_load}x the mean tokens, on other stages {expert_load_of_others}x",
    "mostly expert {hot_expert} of layer {hot_layer}",
)
_KV_CACHE = _Words("a small KV cache", ("{blocks} blocks", "{all_preemptions}"), "more KV-cache memory would help")
_WORDS = {
    Root.SLOW_STAGE: _Words(
        "a slow stage", _SLOW, "fewer layers on it (parallel.layers) or a device like the other stages' would help"
    ),
    Root.UNEVEN_LAYERS: _Words("uneven layers", ("{layers} of {of_layers}",), "", True),
    Root.LM_HEAD: _Words("the LM head", _SLOW, "fewer layers on it (parallel.layers) would help"),
    Root.STRAGGLER: _Words(
        "a straggler",
        ("{ratio}x its usual time from {start_s} s to {end_s} s",),
        "check what else ran on its device then",
    ),
    Root.CHANCE: _Words("stage-time jitter", (), "dedicated devices would help"),
    Root.MICRO_BATCHES: _Words("uneven micro-batches", (), "", True),
    Root.POLICY: _Words("the scheduling policy", ("{policy}",)),
    Root.DEPTH: _Words("few micro-batches in flight", ("at most {depth}",), "", True),
    Root.TRANSPORT: _Words("slow links", ("{link}",), "a faster link would help", True),
    Root.CONTROL: _Words("coordinator overhead", (), "a dedicated core for the coordinator would help"),
    Root.FEW_REQUESTS: _Words(
        "few concurrent requests",
        ("at most {clients} unfinished", "think time {think}"),
        "more concurrent requests would help",
        True,
    ),
    Root.KV_FULL: _KV_CACHE,
    Root.PREEMPTION: _KV_CACHE,
    Root.RECOVERY: _Words("fault recovery", ("{all_faults}",), "spare ranks shorten it (parallel.spares)"),
    Root.OVERLOAD: _Words(
        "overload",
        ("{arrived_per_s} requests/s arrived", "{served_per_s} were served"),
        "a lower request rate or more devices would help",
    ),
    Root.SMALL_CHUNK: _Words("small chunks", ("{tokens} tokens",), "", True),
    Root.LARGE_CHUNK: _Words("large chunks", ("{tokens} tokens",), "", True),
    Root.SMALL_BATCH: _Words("small micro-batches", ("at most {batch} requests",), "", True),
    Root.TENSOR_PARALLEL: _Words("tensor parallelism across nodes"),
    Root.LONG_PROMPTS: _Words(
        "a few long prompts",
        ("{prompts} of {tokens} tokens", "median {usual}"),
        "a separate pool for them would help",
        True,
    ),
    Root.CONTENTION: _Words("CPU contention", (), "dedicated cores for each rank would help (parallel.threads)"),
    Root.SLOW_COMPUTE: _Words("slow compute"),
}
