"""A run in words: what costs it most and what undoes that, then how sure this is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

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
_EXACT = 0.001  # of the metric: a narrower range is not worth a sentence

Evidence = Mapping[str, float]


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
    name = _NAMES[cause.cause][0]
    if cause.stage is None:
        return name
    if cause.cause == Root.TRANSPORT:
        return f"{name}, most after stage {cause.stage}"
    return f"{name} {cause.stage}" if name.endswith("stage") else f"{name} on stage {cause.stage}"


def causes_listed(causes: Sequence[SizedCause]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the heads and rows of the list of causes: columns only where there is something in them."""
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
    _, detail, is_several = _NAMES[cause.cause]
    shown = cause.says or detail(cause.evidence, about)
    text = cause_name(cause) + (f" ({shown})" if shown else "")
    text = f"{cause.where}, {text}" if cause.where else text
    of = "" if metric == "duration" else f" of {METRIC_NAMES[metric]}"
    amount = f"{seconds_text(cause.seconds)} of {seconds_text(value)}{of} ({percent_text(cause.share)})"
    at_most = "" if cause.low > 0 else " at most"
    return f"{text} {'cost' if is_several else 'costs'}{at_most} {amount}"


def _change(cause: SizedCause, *, is_ours: bool) -> str:
    if not cause.change:
        advice = _ADVICE.get(cause.cause, "")
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


def _healthy(idle: Mapping[Cause, float], running: float) -> str:
    busy = 1 - sum(idle.values())
    text = f"Nothing to mend: {percent_text(busy)} busy"
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


def _slow(evidence: Evidence, about: RunWords) -> str:
    text = f"{evidence['ratio']:.2g} times the others' time" if "ratio" in evidence else ""
    if "expert_load" in evidence:
        load, others = evidence["expert_load"], evidence["expert_load_of_others"]
        text += (
            f", as its busiest experts get {load:.2g} times the mean of tokens ({others:.2g} times on the others), "
            f"most often expert {evidence['hot_expert']:.0f} of layer {evidence['hot_layer']:.0f}"
        )
    return text


def _layers(evidence: Evidence, about: RunWords) -> str:
    return f"{evidence['layers']:.0f} of {evidence['of_layers']:.0f}" if "layers" in evidence else ""


def _links(evidence: Evidence, about: RunWords) -> str:
    if "tokens_per_s" not in evidence or about.token_bytes is None:
        return ""
    return f"{_few(evidence['tokens_per_s'] * about.token_bytes / 1e9)} GB/s"


def _straggler(evidence: Evidence, about: RunWords) -> str:
    if "ratio" not in evidence:
        return ""
    when = f" from {evidence['start_s']:,.1f} s to {evidence['end_s']:,.1f} s" if "start_s" in evidence else ""
    return f"{evidence['ratio']:.2g} times its usual time{when}"


def _memory(evidence: Evidence, about: RunWords) -> str:
    parts = [f"{_few(evidence['blocks'])} blocks"] if "blocks" in evidence else []
    parts += [counted(round(evidence["preemptions"]), "preemption")] if evidence.get("preemptions") else []
    return ", ".join(parts)


def _clients(evidence: Evidence, about: RunWords) -> str:
    if "clients" not in evidence:
        return ""
    think = f", each after {seconds_text(evidence['think_s'])}" if evidence.get("think_s", 0.0) > 0.001 else ""
    return f"{_few(evidence['clients'])} unfinished at most{think}"


def _overload(evidence: Evidence, about: RunWords) -> str:
    if "arrived_per_s" not in evidence:
        return ""
    return f"{_few(evidence['arrived_per_s'])} requests/s arrive, {_few(evidence['served_per_s'])} are served"


def _prompts(evidence: Evidence, about: RunWords) -> str:
    if "prompts" not in evidence:
        return ""
    return f"{_few(evidence['prompts'])} of {_few(evidence['tokens'])} tokens, the usual has {_few(evidence['usual'])}"


def _policy(evidence: Evidence, about: RunWords) -> str:
    return about.policy or ""


def _of(key: str, text: str) -> Callable[[Evidence, RunWords], str]:
    return lambda evidence, about: text.format(_few(evidence[key])) if key in evidence else ""


def _nothing(evidence: Evidence, about: RunWords) -> str:
    return ""


# Of each root its name, what shows it, and whether the name is a plural.
_NAMES: dict[Root, tuple[str, Callable[[Evidence, RunWords], str], bool]] = {
    Root.SLOW_STAGE: ("a slow stage", _slow, False),
    Root.UNEVEN_LAYERS: ("uneven layers", _layers, True),
    Root.LM_HEAD: ("the LM head", _slow, False),
    Root.STRAGGLER: ("a straggler", _straggler, False),
    Root.CHANCE: ("stage times that vary", _nothing, True),
    Root.MICRO_BATCHES: ("micro-batches that differ", _nothing, True),
    Root.POLICY: ("the policy", _policy, False),
    Root.DEPTH: ("few micro-batches in flight", _of("depth", "{} at most"), True),
    Root.TRANSPORT: ("slow links", _links, True),
    Root.CONTROL: ("late dispatches", _nothing, True),
    Root.FEW_REQUESTS: ("few clients", _clients, True),
    Root.KV_FULL: ("a small KV cache", _memory, False),
    Root.PREEMPTION: ("a small KV cache", _memory, False),
    Root.RECOVERY: ("faults", _of("faults", "{}"), True),
    Root.OVERLOAD: ("overload", _overload, False),
    Root.SMALL_CHUNK: ("small chunks", _of("tokens", "{} tokens"), True),
    Root.LARGE_CHUNK: ("large chunks", _of("tokens", "{} tokens"), True),
    Root.SMALL_BATCH: ("small micro-batches", _of("batch", "{} requests at most"), True),
    Root.TENSOR_PARALLEL: ("tensor parallelism across nodes", _nothing, False),
    Root.LONG_PROMPTS: ("long prompts among short ones", _prompts, True),
    Root.CONTENTION: ("processor contention", _nothing, False),
    Root.SLOW_COMPUTE: ("slow compute", _nothing, False),
}
# What to do where no key undoes a cause.
_ADVICE = {
    Root.SLOW_STAGE: "fewer layers on it (parallel.layers) or a device like the others' would help",
    Root.LM_HEAD: "fewer layers on it (parallel.layers) would help",
    Root.STRAGGLER: "look at what else its device did then",
    Root.CHANCE: "devices without other work would help",
    Root.TRANSPORT: "a faster link would help",
    Root.CONTROL: "a core of its own for the coordinator would help",
    Root.FEW_REQUESTS: "more requests at once would help",
    Root.KV_FULL: "more memory for the KV cache would help",
    Root.PREEMPTION: "more memory for the KV cache would help",
    Root.RECOVERY: "spare ranks shorten it (parallel.spares)",
    Root.OVERLOAD: "fewer requests/s or more devices would help",
    Root.LONG_PROMPTS: "a pool of their own would help",
    Root.CONTENTION: "cores of its own for each rank would help (parallel.threads)",
}
