"""A run in words: what cost it most, what that comes from, and what would change it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..core.numbers import counted
from ..drawing.formatting import cause_label, percent_text, seconds_text
from ..ledger.causes import Cause
from .explanation import METRIC_NAMES, Outcome
from .finding import LEAST_SHARE, Finding, Findings
from .roots import Root
from .run_words import RunWords

_MOST_HERE = 0.8  # of a root's seconds on one replica, from which on a sentence is about that replica
_MOST_SENTENCES = 3
_MUCH_MORE = 0.05  # share of a metric that a trade must save beyond the best change to be named too
_PB = {Cause.PB1_PREFILL_SIZE: "PB1", Cause.PB2_PREFILL_DECODE: "PB2", Cause.PB3_DECODE_CONTEXT: "PB3"}
_OF_PROMPTS = (Cause.PB1_PREFILL_SIZE, Cause.PB2_PREFILL_DECODE)
_LARGE_CHUNK = 0.5  # of the median prompt, from which on a chunk cuts prompts into unlike parts
_KV_FULL = 0.7  # of the KV blocks in use while requests wait, from which on the cache is the bound
_NAMED = 0.1  # of idle time without work, from which on one kind of it is named
_LEAST_THINK_S = 0.001  # from an answer to the next request, from which on it is named


def sentences(
    findings: Findings,
    advice: Sequence[Outcome] | None = None,
    metric: str = "duration",
    about: RunWords | None = None,
    *,
    is_ours: bool = True,
) -> list[str]:
    """Say in two or three sentences what cost a run most, what that comes from, and what would change it.

    Args:
        findings: where the run's stage time went.
        advice: changes that are worth making by replays, the best first, which is named with its interval; None where
            nothing was replayed.
        metric: by which they are ranked.
        about: the run: its policy is named where it is the cause, and not recommended again.
        is_ours: whether gapless ran it, so that its keys can make a change.

    Returns:
        The sentences, the largest cause first; none of a run without stage time.
    """
    if not findings.found and not findings.busy_share:
        return []
    largest = findings.largest
    if largest is None:
        return [*_unexplained(findings), _nothing(findings), *_advised(advice, metric)]
    if not findings.busy_share and largest.root == Root.FEW_REQUESTS:
        return ["No request was there."]
    said, about = _WORDS[largest.root], about or RunWords({})
    first = said.first.format(_part(largest)) if isinstance(said.first, str) else said.first(largest, about)
    lines = [_placed(largest, first)]
    change = said.change if isinstance(said.change, str) else said.change(largest, about)
    if not change.endswith("."):
        change += f" would save at most {percent_text(largest.share)} of the run."
    lines += _advised(advice, metric, largest.root) or [change if is_ours else re.sub(r" \([^)]*\)", "", change)]
    lines += _unexplained(findings)
    rest = [finding for finding in findings.ranked[1:] if finding.is_large]
    if rest and len(lines) < _MOST_SENTENCES:
        lines.append(f"Next: {root_name(rest[0])}, {percent_text(rest[0].share)} of stage time.")
    return lines


def _unexplained(findings: Findings) -> list[str]:
    """Say how much idle time a trace does not explain, where that is worth a sentence."""
    if findings.unknown_share < LEAST_SHARE:
        return []
    return [
        f"For {percent_text(findings.unknown_share)} of stage time the trace does not say why stages were idle: no "
        "request had come, or the engine had not scheduled it."
    ]


def _nothing(findings: Findings) -> str:
    largest, share = next(iter(findings.ranked), None), findings.bound_share
    if share is None:
        who = "the stage computes" if findings.num_stages == 1 else "the stages compute"
        text, and_ = f"No idle time is worth removing: {who} {percent_text(findings.busy_share)} of the time", ", and"
    else:
        bound = f"{seconds_text(share * findings.span)}, {percent_text(share)} of it"
        by = "by the cost model" if findings.is_foretold else "as its own micro-batches show"
        text = f"Nothing large slowed this run: of {seconds_text(findings.span)}, the work itself takes {bound}, {by}"
        and_ = ";"
    return f"{text}{and_} the largest cause, {root_name(largest)}, takes {_part(largest)}." if largest else f"{text}."


def root_name(finding: Finding) -> str:
    """Name what a finding is of in a few words."""
    if finding.root == Root.MICRO_BATCHES:
        assert finding.cause is not None
        return _PB.get(finding.cause, cause_label(finding.cause))
    return _WORDS[finding.root].name


def _placed(finding: Finding, text: str) -> str:
    """Say on which of several replicas it is."""
    if not finding.where:
        return text
    if finding.stage is not None or finding.there >= _MOST_HERE * finding.seconds:
        is_name = text[1].isupper() or text[1].isdigit()  # as PB1
        text = text if is_name else text[0].lower() + text[1:]
        return f"{finding.where[0].upper()}{finding.where[1:]}: {text}"
    return f"{text} Most of it is on {finding.where}."


def _advised(advice: Sequence[Outcome] | None, metric: str, root: Root | None = None) -> list[str]:
    """Name the change that saves most for certain, and before it the best one that changes what `root` comes from."""
    if advice is None:
        return []
    sure = [each for each in advice if each.saves[metric].low > 0]
    if not sure:
        text = "No change that was replayed is sure to save anything"
        return [f"{text}; {_saving(each, metric, 'may save')}." for each in advice[:1]] or [f"{text}."]
    best, keys = sure[0], _WORDS[root].keys if root is not None else ()
    of_root = [each for each in sure if each.overrides and all(text.startswith(keys) for text in each.overrides)]
    if keys and of_root and of_root[0] is not best:
        return [f"{_saving(of_root[0], metric)}.", f"{_saving(best, metric, 'would save most,')}."]
    much = best.saves[metric].middle + _MUCH_MORE
    trades = [each for each in sure if each.is_trade and each.saves[metric].low > much]
    return [f"{_saving(each, metric)}." for each in (best, *trades[:1])]


def _saving(change: Outcome, metric: str, would_save: str = "would save") -> str:
    saves, but = change.saves[metric], f", but {change.note}" if change.is_trade else ""
    low, high = f"{100 * saves.low:.1f}", f"{100 * saves.high:.1f}"
    interval = f" ({low} to {high})" if low != high else ""
    of = "run" if metric == "duration" else METRIC_NAMES[metric]
    return f"{change.change} {would_save} {percent_text(saves.middle)} of the {of}{interval}{but}"


def _part(finding: Finding, share: float = 1.0, *, of: str = "stage time") -> str:
    """Write a part of a finding as a share of stage time, and as seconds of the run where it is of a run."""
    seconds = f" ({seconds_text(share * finding.of_run)} of the run)" if finding.of_run else ""
    return f"{percent_text(share * finding.share)} of {of}{seconds}"


def _times(ratio: float) -> str:
    return f"{ratio:.{0 if ratio >= 9.95 else 1 if ratio >= 1.15 else 2}f} times"


def _few(value: float) -> str:
    if value >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _others(finding: Finding) -> str:
    return "the other" if finding.evidence["stages"] == 2 else "the others"


def _waiting(finding: Finding) -> str:
    others = "stage waits" if finding.evidence["stages"] == 2 else "stages wait"
    return f"the other {others} for it for {_part(finding, of='all stage time')}"


def _slow_stage(finding: Finding, about: RunWords) -> str:
    evidence = finding.evidence
    took = f"{_times(evidence['ratio'])} as long as {_others(finding)}"
    layers = f"{evidence['layers']:.0f} of {evidence['of_layers']:.0f} layers" if "layers" in evidence else ""
    if finding.root == Root.UNEVEN_LAYERS:
        return f"Stage {finding.stage} holds {layers} and takes {took}: {_waiting(finding)}."
    layers = f", with {layers}" if layers else ""
    if "expert_load" in evidence:
        layers += (
            f", as its busiest experts get {_times(evidence['expert_load'])} the mean of tokens "
            f"({_few(evidence['expert_load_of_others'])} times on {_others(finding)}), most often expert "
            f"{evidence['hot_expert']:.0f} of layer {evidence['hot_layer']:.0f}"
        )
    return f"Stage {finding.stage} takes {took} for the same micro-batches{layers}: {_waiting(finding)}."


def _lm_head(finding: Finding, about: RunWords) -> str:
    evidence = finding.evidence
    ratio, of_prompts = _times(evidence["ratio_of_decodes"]), evidence["ratio_of_prompts"]
    beside = "but not for those with prompts" if of_prompts < 1.15 else f"{_times(of_prompts)} for those with prompts"
    return (
        f"Stage {finding.stage} takes {ratio} as long as {_others(finding)} for micro-batches of decodes, {beside}, as "
        f"the LM head is on it: {_waiting(finding)}."
    )


def _straggler(finding: Finding, about: RunWords) -> str:
    evidence, ratio = finding.evidence, _times(finding.evidence["ratio"])
    when = f"from {evidence['start_s']:,.1f} s to {evidence['end_s']:,.1f} s"
    return f"Stage {finding.stage} computed {ratio} as long as usual {when}: {_waiting(finding)}."


def _chance(finding: Finding, about: RunWords) -> str:
    if finding.stage is not None:
        return f"Stage {finding.stage} takes longer than usual for some of its micro-batches: {_waiting(finding)}."
    text = f"Stage times that vary by chance take {_part(finding)}"
    return f"{text}: now and then a stage takes longer than it usually does for such a micro-batch."


def _micro_batches(finding: Finding, about: RunWords) -> str:
    evidence, by_cause = finding.evidence, finding.by_cause
    assert finding.cause is not None
    name = _PB.get(finding.cause, "Imbalance between chunks")
    own = by_cause[finding.cause]
    text = f"{name} takes {_part(finding, own / sum(by_cause.values()))}"
    if others := [name for cause, name in _PB.items() if cause != finding.cause and by_cause[cause] >= 0.1 * own]:
        text += f", and with {' and '.join(others)} {percent_text(finding.share)}"
    if "low" not in evidence:
        return f"{text}."
    under = f"under {about.policy} " if about.policy is not None else ""
    text = f"{text}: {under}{_compared(finding.cause, evidence)}"
    if about.chunk is not None and finding.cause in _OF_PROMPTS and about.chunk >= _LARGE_CHUNK * evidence["prompt"]:
        text += f", since the chunk of {about.chunk:,} tokens is too large for prompts of {_few(evidence['prompt'])}"
    return f"{text}."


def _compared(cause: Cause, evidence: Mapping[str, float]) -> str:
    between = f"{evidence['low']:,.0f} to {evidence['high']:,.0f}"
    if cause == Cause.PB1_PREFILL_SIZE:
        return f"micro-batches with prompts hold {between} prompt tokens"
    if cause == Cause.PB2_PREFILL_DECODE:
        return (
            f"{evidence['with_prompts']:,.0f} micro-batches hold prompts, {evidence['median']:,.0f} tokens in the "
            f"median, and {evidence['without']:,.0f} only decodes"
        )
    if cause == Cause.PB3_DECODE_CONTEXT:
        return f"micro-batches of decodes read contexts of {between} tokens"
    return f"chunks of one size read {between} tokens of the prompt before them"


def _even_policy(finding: Finding, about: RunWords) -> str:
    if about.policy == "equal_time":
        return "Micro-batches that are more alike (scheduler.chunk)"
    return "A policy that evens out micro-batches (scheduler=equal_time)"


def _transport(finding: Finding, about: RunWords) -> str:
    evidence, share = finding.evidence, _part(finding)
    if evidence.get("kv_transfer_s", 0.0) >= 0.5 * finding.there:
        return f"KV caches from the other pool were under way for {share}."
    text = f"Activations were under way for {share}"
    if "link_s" not in evidence or finding.stage is None:
        return f"{text}."
    tokens = evidence["tokens"]
    what = counted(round(tokens), "token")
    if about.token_bytes is not None:
        rate = evidence["tokens_per_s"] * about.token_bytes
        what += f", {tokens * about.token_bytes / 1e6:,.2g} MB, at {rate / 1e9:,.2g} GB/s"
    took = seconds_text(evidence["link_s"])
    return f"{text}: from stage {finding.stage} to stage {finding.stage + 1} {took} in the median for {what}."


def _control(finding: Finding, about: RunWords) -> str:
    evidence = finding.evidence
    text = f"The coordinator dispatched late for {_part(finding)}"
    if "late_s" not in evidence:
        return f"{text}: work was there, and no micro-batch of it."
    late, count = evidence["late"], evidence["micro_batches"]
    which = "each micro-batch" if late >= 0.95 * count else f"{late:,.0f} of {count:,.0f} micro-batches"
    return f"{text}: the stages waited {seconds_text(evidence['late_s'])} in the median for the dispatch of {which}."


def _few_requests(finding: Finding, about: RunWords) -> str:
    evidence, by_cause = finding.evidence, finding.by_cause
    none, flying = by_cause[Cause.STARVED_NO_REQUEST], by_cause.get(Cause.STARVED_IN_FLIGHT, 0.0)
    none, flying = none / (none + flying), flying / (none + flying)
    text, why = [], []
    if none >= _NAMED:
        text.append(f"no request was there for {_part(finding, none)}")
        why += [f"{_few(evidence['requests_per_s'])} requests/s arrived"] if "requests_per_s" in evidence else []
    if flying >= _NAMED:
        text.append(f"all requests were in flight for {_part(finding, flying)}")
        why += [f"{_few(evidence['running'])} ran at a time"] if "running" in evidence else []
    because = f", as {' and '.join(why)}" if why else ""
    return f"Too few requests: {' and '.join(text)}{because}{_clients(evidence)}."


def _clients(evidence: Mapping[str, float]) -> str:
    """Say how slowly clients ask, where each waits for its answer."""
    if "clients" not in evidence:
        return ""
    count, think = evidence["clients"], evidence["think_s"]
    after = f"asks {seconds_text(think)} after an answer" if think >= _LEAST_THINK_S else "waits for answers"
    return f"; the client {after}, with {_few(count)} unfinished at most"


def _dealing(finding: Finding, about: RunWords) -> str:
    running, waiting = finding.evidence["running"], finding.evidence["waiting"]
    text = f"All requests that ran were in flight for {_part(finding)}, {_few(running)} at a time"
    if waiting >= 1:
        return f"{text}, while {_few(waiting)} waited: {about.who} took no more of them."
    return f"{text}: {about.who} put them into fewer micro-batches than there are stages."


def _kv_full(finding: Finding, about: RunWords) -> str:
    evidence = finding.evidence
    text = f"The KV cache had no room for waiting requests for {_part(finding)}"
    if "blocks" not in evidence:
        return f"{text}."
    return (
        f"{text}: {percent_text(evidence['kv_share'])} of its {evidence['blocks']:,.0f} blocks were in use in the mean "
        f"by {_few(evidence['running'])} requests, while {_few(evidence['waiting'])} waited."
    )


def _recovery(finding: Finding, about: RunWords) -> str:
    faults, longest = counted(int(finding.evidence["faults"]), "fault"), seconds_text(finding.evidence["longest_s"])
    return f"The pipeline had failed for {_part(finding)}: {faults}, the longest repaired after {longest}."


def _fill_drain(finding: Finding, about: RunWords) -> str:
    if finding.evidence.get("unused_s", 0.0) > 0:
        return f"No work was there for {_part(finding)}, before the first and after the last micro-batch."
    count = f"{finding.evidence['micro_batches']:,.0f} micro-batches"
    return f"Filling and draining the pipeline takes {_part(finding)} of this short run, which has {count}."


def _longer_run(finding: Finding, about: RunWords) -> str:
    if finding.where:
        return "Fewer such replicas, requests that are dealt more evenly, or a longer run would fill that time."
    return "A longer run has less of it."


def _overload(finding: Finding, about: RunWords) -> str:
    evidence = finding.evidence
    served = _few(evidence["served_per_s"])
    return (
        f"Overload: {_few(evidence['arrived_per_s'])} requests/s arrived and {served} were served, so that the queue "
        f"grew to {_few(evidence['unfinished'])}, which takes {_part(finding)} after the last arrival; at "
        f"{served} requests/s it does not grow."
    )


def _small_chunk(finding: Finding, about: RunWords) -> str:
    return (
        f"The chunk is too small: micro-batches with prompts, of {_few(finding.evidence['tokens'])} prompt tokens in "
        f"the median, take {_part(finding)} longer than as many tokens in large ones, since each reads all weights."
    )


def _bound_of_batches(finding: Finding) -> Root:
    """Return what keeps batches small: too few requests, a full KV cache, or else the policy."""
    if finding.evidence["waiting"] < 1:
        return Root.FEW_REQUESTS
    return Root.KV_FULL if finding.evidence["kv_share"] >= _KV_FULL else Root.SMALL_BATCH


def _small_batch(finding: Finding, about: RunWords) -> str:
    evidence, share, by = finding.evidence, _part(finding), _bound_of_batches(finding)
    rows, running = evidence["rows"], _few(evidence["running"])
    read = f"all weights are read for {_few(rows)} token{'' if rows == 1 else 's'} at a time"
    run = f"{running} request{' runs' if running == '1' else 's run'}"
    if by == Root.FEW_REQUESTS:
        text = f"Too few requests: {read}, as only {run}; memory bandwidth at such small batches takes {share}"
        return f"{text}{_clients(evidence)}."
    if by == Root.KV_FULL:
        return f"The KV cache had no room for waiting requests: {read}, as only {run}, which takes {share}."
    why = f"{about.who} took no more of them"
    if rows >= evidence["batch"] > 0:
        why = f"a micro-batch holds {_few(evidence['batch'])} at most"
    text = f"Memory bandwidth at small batches takes {share}: {read}, as only {run}"
    return f"{text} while {_few(evidence['waiting'])} wait: {why}."


def _larger_batch(finding: Finding, about: RunWords) -> str:
    by = _bound_of_batches(finding)
    if by == Root.SMALL_BATCH:
        return "More requests at a time (scheduler.max_batch, scheduler.batch) would save most of that."
    return _MORE_BLOCKS if by == Root.KV_FULL else _MORE_REQUESTS


def _depth(finding: Finding, about: RunWords) -> str:
    depth = finding.evidence["depth"]
    are = "micro-batch is" if depth == 1 else "micro-batches are"
    return f"Only {depth:.0f} {are} in flight, fewer than there are stages: they wait for {_part(finding)}."


def _contention(finding: Finding, about: RunWords) -> str:
    where, who = ("", "ranks") if finding.stage is None else (f" on stage {finding.stage}", "it")
    text = f"Processor contention{where} takes {_part(finding)}: {who} could have computed"
    return f"{text}, and waited for a processor that others had."


_Text = str | Callable[[Finding, RunWords], str]


class _Words(NamedTuple):
    """What is said of a root.

    Attributes:
        name: in a few words.
        first: the first sentence, where it is the largest; of a text `{}` is the part of stage time.
        change: what kind of change would help: a sentence, or what would save its share at most.
        keys: what the overrides begin with that change what the root comes from.
    """

    name: str
    first: _Text
    change: _Text
    keys: tuple[str, ...] = ()


_MORE_REQUESTS = "More requests at once would fill that time, or fewer devices (parallel.pp, parallel.tp) would do."
_MORE_BLOCKS = (
    "More KV blocks (cache.num_blocks, hardware.memory_gib), or more devices (parallel.pp, parallel.tp), would fill "
    "that time."
)
_WORDS = {
    Root.SLOW_STAGE: _Words(
        "a slower stage",
        _slow_stage,
        "Fewer layers on it (parallel.layers, or its speed in parallel.stage_speeds) or a device like the others'",
        ("parallel.layers=",),
    ),
    Root.UNEVEN_LAYERS: _Words(
        "uneven layers", _slow_stage, "Layers in balance (parallel.layers=null)", ("parallel.layers=",)
    ),
    Root.LM_HEAD: _Words("the LM head", _lm_head, "Fewer layers on it (parallel.layers)", ("parallel.layers=",)),
    Root.STRAGGLER: _Words("a stage that was slow for a while", _straggler, "A look at what else its device did then"),
    Root.CHANCE: _Words(
        "stage times that vary by chance",
        _chance,
        "One micro-batch more in flight (parallel.depth), or devices without other work,",
    ),
    Root.MICRO_BATCHES: _Words("micro-batches that differ", _micro_batches, _even_policy, ("scheduler",)),
    Root.DEPTH: _Words(
        "too few micro-batches in flight",
        _depth,
        "As many micro-batches in flight as stages (parallel.depth)",
        ("parallel.depth=",),
    ),
    Root.TRANSPORT: _Words("transport", _transport, "A faster link, or smaller micro-batches,", ("parallel.",)),
    Root.CONTROL: _Words(
        "late dispatches",
        _control,
        "A core of its own for the coordinator, or fewer and larger micro-batches (scheduler.chunk),",
        ("parallel.depth=", "scheduler.chunk="),
    ),
    Root.DEALING: _Words(
        "requests that the policy leaves out or puts together",
        _dealing,
        "A policy that deals requests over all micro-batches (scheduler=equal_time, scheduler.max_batch)",
        ("scheduler",),
    ),
    Root.FEW_REQUESTS: _Words("waits for requests", _few_requests, _MORE_REQUESTS),
    Root.KV_FULL: _Words("waits for KV blocks", _kv_full, _MORE_BLOCKS, ("cache.", "scheduler.")),
    Root.RECOVERY: _Words("recovery", _recovery, "Ranks that stand by (parallel.spares)"),
    Root.FILL_DRAIN: _Words("fill and drain", _fill_drain, _longer_run),
    Root.OVERLOAD: _Words("overload", _overload, "Requests at that rate, or more devices (parallel.pp, parallel.tp),"),
    Root.SMALL_CHUNK: _Words(
        "chunks that are too small", _small_chunk, "A larger chunk (scheduler.chunk)", ("scheduler.chunk=",)
    ),
    Root.SMALL_BATCH: _Words(
        "memory bandwidth at small batches", _small_batch, _larger_batch, ("scheduler.", "cache.")
    ),
    Root.PADDING: _Words(
        "padding to tiles",
        "Padding of rows to whole tiles takes {}.",
        "A chunk whose micro-batches fill their tiles (scheduler.chunk)",
        ("scheduler.chunk=",),
    ),
    Root.TENSOR_PARALLEL: _Words(
        "tensor parallelism across nodes",
        "Tensor parallelism across nodes takes {}: the ranks of a stage lie on several nodes, and add up their parts "
        "over the network after each layer's products.",
        "Stages that fit into a node (a smaller parallel.tp and a larger parallel.pp)",
        ("parallel.",),
    ),
    Root.LONG_PROMPTS: _Words(
        "attention over long prompts",
        "Long prompts: attention over what comes before takes {}.",
        "A faster attention kernel, or shorter prompts,",
    ),
    Root.PREEMPTION: _Words(
        "preempted requests",
        "Preempted requests: to compute their tokens again takes {}, as the KV cache was too small.",
        "More KV blocks (cache.num_blocks, hardware.memory_gib), or fewer requests at a time (scheduler.max_batch),",
        ("cache.", "scheduler."),
    ),
    Root.CONTENTION: _Words(
        "processor contention",
        _contention,
        "Cores of its own for each rank (parallel.threads, fewer ranks, or nothing beside them)",
    ),
}
