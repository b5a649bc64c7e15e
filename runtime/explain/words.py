"""A run in words: what cost it most, what that comes from, and what would change it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ..drawing.formatting import cause_label, percent_text, seconds_text
from ..ledger.causes import Cause
from .explanation import Outcome
from .finding import LEAST_SHARE, Finding, Findings
from .roots import Root

_MOST_HERE = 0.8  # of a root's seconds on one replica, from which on a sentence is about that replica
_MOST_SENTENCES = 3
_MUCH_MORE = 0.05  # share of a metric that a trade must save beyond the best change to be named too
_SHORT = {
    Root.SLOW_STAGE: "a slower stage",
    Root.UNEVEN_LAYERS: "uneven layers",
    Root.LM_HEAD: "the LM head",
    Root.STRAGGLER: "a stage that was slow for a while",
    Root.CHANCE: "stage times that vary by chance",
    Root.DEPTH: "too few micro-batches in flight",
    Root.TRANSPORT: "transport",
    Root.CONTROL: "late dispatches",
    Root.DEALING: "requests that the policy leaves out or puts together",
    Root.FEW_REQUESTS: "waits for requests",
    Root.KV_FULL: "waits for KV blocks",
    Root.RECOVERY: "recovery",
    Root.FILL_DRAIN: "fill and drain",
    Root.OVERLOAD: "overload",
    Root.SMALL_CHUNK: "chunks that are too small",
    Root.SMALL_BATCH: "memory bandwidth at small batches",
    Root.PADDING: "padding to tiles",
    Root.TENSOR_PARALLEL: "tensor parallelism across nodes",
    Root.LONG_PROMPTS: "attention over long prompts",
    Root.PREEMPTION: "preempted requests",
    Root.CONTENTION: "processor contention",
}
_KEYS: dict[Root, tuple[str, ...]] = {  # that change what the root comes from
    Root.SLOW_STAGE: ("parallel.layers=",),
    Root.UNEVEN_LAYERS: ("parallel.layers=",),
    Root.LM_HEAD: ("parallel.layers=",),
    Root.MICRO_BATCHES: ("scheduler",),
    Root.DEALING: ("scheduler",),
    Root.DEPTH: ("parallel.depth=",),
    Root.TRANSPORT: ("parallel.",),
    Root.CONTROL: ("parallel.depth=", "scheduler.chunk="),
    Root.KV_FULL: ("cache.", "scheduler."),
    Root.SMALL_CHUNK: ("scheduler.chunk=",),
    Root.SMALL_BATCH: ("scheduler.", "cache."),
    Root.PADDING: ("scheduler.chunk=",),
    Root.TENSOR_PARALLEL: ("parallel.",),
    Root.PREEMPTION: ("cache.", "scheduler."),
}
_PB = {Cause.PB1_PREFILL_SIZE: "PB1", Cause.PB2_PREFILL_DECODE: "PB2", Cause.PB3_DECODE_CONTEXT: "PB3"}
_OF_PROMPTS = (Cause.PB1_PREFILL_SIZE, Cause.PB2_PREFILL_DECODE)
_LARGE_CHUNK = 0.5  # of the median prompt, from which on a chunk cuts prompts into unlike parts
_KV_FULL = 0.7  # of the KV blocks in use while requests wait, from which on the cache is the bound
_LEAST_THINK_S = 0.001  # from an answer to the next request, from which on it is named
_METRICS = {"duration": "the run", "p99_itl_ms": "the p99 TBT", "p99_ttft_ms": "the p99 TTFT"}


def sentences(
    findings: Findings,
    advice: Sequence[Outcome] | None = None,
    metric: str = "duration",
    *,
    policy: str | None = None,
    chunk: int | None = None,
    token_bytes: float | None = None,
    is_ours: bool = True,
) -> list[str]:
    """Say in two or three sentences what cost a run most, what that comes from, and what would change it.

    Args:
        findings: where the run's stage time went.
        advice: changes that are worth making by replays, the best first, which is named with its interval; None where
            nothing was replayed.
        metric: by which they are ranked.
        policy: the run's, which is named where it is the cause, and not recommended again.
        chunk: most prompt tokens of a micro-batch, where its policy has such a bound.
        token_bytes: of one token's activation between two stages, where they are known.
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
    own: dict[Root, Callable[[], str]] = {  # that need more than the finding
        Root.TRANSPORT: lambda: _transport(largest, token_bytes),
        Root.MICRO_BATCHES: lambda: _micro_batches(largest, policy, chunk),
        Root.DEALING: lambda: _dealing(largest, policy),
        Root.SMALL_BATCH: lambda: _small_batch(largest, policy),
    }
    if largest.root in own:
        first = own[largest.root]()
    elif largest.root in _PLAIN:
        first = _PLAIN[largest.root].format(_part(largest))
    else:
        first = _WRITERS[largest.root](largest)
    lines = [_placed(largest, first)]
    change = _change(largest, policy)
    lines += _advised(advice, metric, largest.root) or [change if is_ours else _without_keys(change)]
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


def _without_keys(text: str) -> str:
    """Leave out the names of keys, which stand in brackets."""
    return re.sub(r" \([^)]*\)", "", text)


def _nothing(findings: Findings) -> str:
    largest = next(iter(findings.ranked), None)
    most = f"the largest cause, {root_name(largest)}, takes {_part(largest)}" if largest is not None else ""
    if findings.bound_share is None:
        who = "the stage computes" if findings.num_stages == 1 else "the stages compute"
        text = f"No idle time is worth removing: {who} {percent_text(findings.busy_share)} of the time"
        return f"{text}, and {most}." if most else f"{text}."
    share = findings.bound_share
    bound = f"{seconds_text(share * findings.span)}, {percent_text(share)} of it"
    by = "by the cost model" if findings.is_foretold else "as its own micro-batches show"
    text = f"Nothing large slowed this run: of {seconds_text(findings.span)}, the work itself takes {bound}, {by}"
    return f"{text}; {most}." if most else f"{text}."


def root_name(finding: Finding) -> str:
    """Name what a finding is of in a few words."""
    if finding.root == Root.MICRO_BATCHES:
        assert finding.cause is not None
        return _PB.get(finding.cause, cause_label(finding.cause))
    return _SHORT[finding.root]


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
    best, keys = sure[0], _KEYS.get(root, ()) if root is not None else ()
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
    return f"{change.change} {would_save} {percent_text(saves.middle)} of {_METRICS[metric]}{interval}{but}"


def _part(finding: Finding, share: float = 1.0, *, of: str = "stage time") -> str:
    """Write a part of a finding as a share of stage time, and as seconds of the run where it is of a run."""
    seconds = f" ({seconds_text(share * finding.of_run)} of the run)" if finding.of_run else ""
    return f"{percent_text(share * finding.share)} of {of}{seconds}"


def _times(ratio: float) -> str:
    return f"{ratio:.{0 if ratio >= 9.95 else 1 if ratio >= 1.15 else 2}f} times"


def _waiting(finding: Finding) -> str:
    others = "the other stage waits" if finding.evidence.get("stages") == 2 else "the other stages wait"
    return f"{others} for it for {_part(finding, of='all stage time')}"


def _others(finding: Finding) -> str:
    return "the other" if finding.evidence.get("stages") == 2 else "the others"


def _slow_stage(finding: Finding) -> str:
    evidence = finding.evidence
    took = f"{_times(evidence['ratio'])} as long as {_others(finding)}"
    text = f"Stage {finding.stage} takes {took} for the same micro-batches"
    if "layers" in evidence:
        text += f", with {evidence['layers']:.0f} of {evidence['of_layers']:.0f} layers"
    return f"{text}: {_waiting(finding)}."


def _uneven_layers(finding: Finding) -> str:
    evidence = finding.evidence
    return (
        f"Stage {finding.stage} holds {evidence['layers']:.0f} of {evidence['of_layers']:.0f} layers and takes "
        f"{_times(evidence['ratio'])} as long as {_others(finding)}: {_waiting(finding)}."
    )


def _lm_head(finding: Finding) -> str:
    evidence = finding.evidence
    ratio, of_prompts = _times(evidence["ratio_of_decodes"]), evidence["ratio_of_prompts"]
    beside = "but not for those with prompts" if of_prompts < 1.15 else f"{_times(of_prompts)} for those with prompts"
    return (
        f"Stage {finding.stage} takes {ratio} as long as {_others(finding)} for "
        f"micro-batches of decodes, {beside}, as the LM head is on it: {_waiting(finding)}."
    )


def _straggler(finding: Finding) -> str:
    evidence, ratio = finding.evidence, _times(finding.evidence["ratio"])
    when = f"from {evidence['start_s']:,.1f} s to {evidence['end_s']:,.1f} s"
    return f"Stage {finding.stage} computed {ratio} as long as usual {when}: {_waiting(finding)}."


def _chance(finding: Finding) -> str:
    return (
        f"Stage times that vary by chance take {_part(finding)}: now and then a stage takes "
        "longer than it usually does for such a micro-batch."
    )


def _micro_batches(finding: Finding, policy: str | None, chunk: int | None) -> str:
    evidence, by_cause = finding.evidence, finding.by_cause
    assert finding.cause is not None
    name = _PB.get(finding.cause, "Imbalance between chunks")
    text = f"{name} takes {_part(finding, by_cause[finding.cause] / sum(by_cause.values()))}"
    least = 0.1 * by_cause[finding.cause]
    others = [name for cause, name in _PB.items() if cause != finding.cause and by_cause[cause] >= least]
    if others:
        text += f", and with {' and '.join(others)} {percent_text(finding.share)}"
    why = _compared(finding.cause, evidence)
    if not why:
        return f"{text}."
    under = f"under {policy} " if policy is not None else ""
    text = f"{text}: {under}{why}"
    if chunk is not None and finding.cause in _OF_PROMPTS and chunk >= _LARGE_CHUNK * evidence["prompt"]:
        text += f", since the chunk of {chunk:,} tokens is too large for prompts of {_few(evidence['prompt'])}"
    return f"{text}."


def _compared(cause: Cause, evidence: Mapping[str, float]) -> str:
    if "low" not in evidence:
        return ""
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


def _transport(finding: Finding, token_bytes: float | None) -> str:
    evidence, share = finding.evidence, _part(finding)
    if evidence.get("kv_transfer_s", 0.0) >= 0.5 * finding.there:
        return f"KV caches from the other pool were under way for {share}."
    text = f"Activations were under way for {share}"
    if "link_s" not in evidence or finding.stage is None:
        return f"{text}."
    tokens = evidence["tokens"]
    what = f"{tokens:,.0f} token{'' if tokens == 1 else 's'}"
    if token_bytes is not None:
        rate = evidence["tokens_per_s"] * token_bytes
        what += f", {tokens * token_bytes / 1e6:,.2g} MB, at {rate / 1e9:,.2g} GB/s"
    took = seconds_text(evidence["link_s"])
    return f"{text}: from stage {finding.stage} to stage {finding.stage + 1} {took} in the median for {what}."


def _control(finding: Finding) -> str:
    evidence = finding.evidence
    text = f"The coordinator dispatched late for {_part(finding)}"
    if "late_s" not in evidence:
        return f"{text}: work was there, and no micro-batch of it."
    late, count = evidence["late"], evidence["micro_batches"]
    which = "each micro-batch" if late >= 0.95 * count else f"{late:,.0f} of {count:,.0f} micro-batches"
    return f"{text}: the stages waited {seconds_text(evidence['late_s'])} in the median for the dispatch of {which}."


def _few_requests(finding: Finding) -> str:
    evidence, by_cause = finding.evidence, finding.by_cause
    none, flying = by_cause[Cause.STARVED_NO_REQUEST], by_cause.get(Cause.STARVED_IN_FLIGHT, 0.0)
    whole = none + flying
    parts = []
    if none >= 0.1 * whole:
        parts.append((none, f"no request was there for {_part(finding, none / whole)}"))
    if flying >= 0.1 * whole:
        parts.append((flying, f"all requests were in flight for {_part(finding, flying / whole)}"))
    text = " and ".join(text for _, text in parts)
    why = []
    if "requests_per_s" in evidence and none >= 0.1 * whole:
        why.append(f"{_few(evidence['requests_per_s'])} requests/s arrived")
    if "running" in evidence and flying >= 0.1 * whole:
        why.append(f"{_few(evidence['running'])} ran at a time")
    return f"Too few requests: {text}{', as ' if why else ''}{' and '.join(why)}{_clients(evidence)}."


def _clients(evidence: Mapping[str, float]) -> str:
    """Say how slowly clients ask, where each waits for its answer."""
    if "clients" not in evidence:
        return ""
    count, think = evidence["clients"], evidence["think_s"]
    after = f"asks {seconds_text(think)} after an answer" if think >= _LEAST_THINK_S else "waits for answers"
    return f"; the client {after}, with {_few(count)} unfinished at most"


def _dealing(finding: Finding, policy: str | None) -> str:
    evidence, share = finding.evidence, _part(finding)
    running, waiting = evidence.get("running", 0.0), evidence.get("waiting", 0.0)
    who = "the policy" if policy is None else f"the policy {policy}"
    text = f"All requests that ran were in flight for {share}, {_few(running)} at a time"
    if waiting >= 1:
        return f"{text}, while {_few(waiting)} waited: {who} took no more of them."
    return f"{text}: {who} put them into fewer micro-batches than there are stages."


def _few(value: float) -> str:
    if value >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _kv_full(finding: Finding) -> str:
    evidence = finding.evidence
    text = f"The KV cache had no room for waiting requests for {_part(finding)}"
    if "blocks" not in evidence:
        return f"{text}."
    return (
        f"{text}: {percent_text(evidence['kv_share'])} of its {evidence['blocks']:,.0f} blocks were in use in the mean "
        f"by {_few(evidence['running'])} requests, while {_few(evidence['waiting'])} waited."
    )


def _recovery(finding: Finding) -> str:
    evidence = finding.evidence
    text = f"The pipeline had failed for {_part(finding)}"
    if not evidence.get("faults"):
        return f"{text}."
    count = evidence["faults"]
    longest = seconds_text(evidence["longest_s"])
    return f"{text}: {count:.0f} fault{'' if count == 1 else 's'}, the longest repaired after {longest}."


def _fill_drain(finding: Finding) -> str:
    evidence, share = finding.evidence, _part(finding)
    if evidence.get("unused_s", 0.0) > 0 and finding.where:
        return f"No work was there for {share}, before the first and after the last micro-batch."
    count = f", which has {evidence['micro_batches']:,.0f} micro-batches" if "micro_batches" in evidence else ""
    return f"Filling and draining the pipeline takes {share} of this short run{count}."


def _overload(finding: Finding) -> str:
    evidence = finding.evidence
    if "served_per_s" not in evidence:
        return f"Overload: the queue of requests grew, which takes {_part(finding)}."
    served = _few(evidence["served_per_s"])
    return (
        f"Overload: {_few(evidence['arrived_per_s'])} requests/s arrived and {served} were served, so that the queue "
        f"grew to {_few(evidence['unfinished'])}, which takes {_part(finding)} after the last arrival; at "
        f"{served} requests/s it does not grow."
    )


def _small_chunk(finding: Finding) -> str:
    what = (
        f", of {_few(finding.evidence['tokens'])} prompt tokens in the median," if "tokens" in finding.evidence else ""
    )
    return (
        f"The chunk is too small: micro-batches with prompts{what} take {_part(finding)} longer than as many tokens in "
        "large ones, since each reads all weights."
    )


def _small_batch(finding: Finding, policy: str | None) -> str:
    evidence, share = finding.evidence, _part(finding)
    if "rows" not in evidence:
        return f"Memory bandwidth at small batches takes {share}: all weights are read for few tokens."
    rows, waiting, running = evidence["rows"], evidence["waiting"], _few(evidence["running"])
    read = f"all weights are read for {_few(rows)} token{'' if rows == 1 else 's'} at a time"
    run = f"{running} request{' runs' if running == '1' else 's run'}"
    if waiting < 1:
        text = f"Too few requests: {read}, as only {run}; memory bandwidth at such small batches takes {share}"
        return f"{text}{_clients(evidence)}."
    if evidence["kv_share"] >= _KV_FULL:
        return f"The KV cache had no room for waiting requests: {read}, as only {run}, which takes {share}."
    bound = evidence["batch"]
    why = f"the policy{'' if policy is None else f' {policy}'} took no more of them"
    if rows >= bound > 0:
        why = f"a micro-batch holds {_few(bound)} at most"
    return f"Memory bandwidth at small batches takes {share}: {read}, as only {run} while {_few(waiting)} wait: {why}."


def _depth(finding: Finding) -> str:
    depth = finding.evidence.get("depth", 1)
    are = "micro-batch is" if depth == 1 else "micro-batches are"
    return f"Only {depth:.0f} {are} in flight, fewer than there are stages: they wait for {_part(finding)}."


def _contention(finding: Finding) -> str:
    where, who = ("", "ranks") if finding.stage is None else (f" on stage {finding.stage}", "it")
    text = f"Processor contention{where} takes {_part(finding)}: {who} could have computed"
    return f"{text}, and waited for a processor that others had."


_PLAIN = {
    Root.PADDING: "Padding of rows to whole tiles takes {}.",
    Root.TENSOR_PARALLEL: "Tensor parallelism across nodes takes {}: the ranks of a stage lie on several nodes, and "
    "add up their parts over the network after each layer's products.",
    Root.LONG_PROMPTS: "Long prompts: attention over what comes before takes {}.",
    Root.PREEMPTION: "Preempted requests: to compute their tokens again takes {}, as the KV cache was too small.",
}
_WRITERS: dict[Root, Callable[[Finding], str]] = {
    Root.SLOW_STAGE: _slow_stage,
    Root.UNEVEN_LAYERS: _uneven_layers,
    Root.LM_HEAD: _lm_head,
    Root.STRAGGLER: _straggler,
    Root.CHANCE: _chance,
    Root.DEPTH: _depth,
    Root.CONTROL: _control,
    Root.FEW_REQUESTS: _few_requests,
    Root.KV_FULL: _kv_full,
    Root.RECOVERY: _recovery,
    Root.FILL_DRAIN: _fill_drain,
    Root.OVERLOAD: _overload,
    Root.SMALL_CHUNK: _small_chunk,
    Root.CONTENTION: _contention,
}

_CHANGES = {
    Root.SLOW_STAGE: "Fewer layers on it (parallel.layers, or its speed in parallel.stage_speeds) or a device like the "
    "others'",
    Root.UNEVEN_LAYERS: "Layers in balance (parallel.layers=null)",
    Root.LM_HEAD: "Fewer layers on it (parallel.layers)",
    Root.STRAGGLER: "A look at what else its device did then",
    Root.CHANCE: "One micro-batch more in flight (parallel.depth), or devices without other work,",
    Root.DEPTH: "As many micro-batches in flight as stages (parallel.depth)",
    Root.TRANSPORT: "A faster link, or smaller micro-batches,",
    Root.CONTROL: "A core of its own for the coordinator, or fewer and larger micro-batches (scheduler.chunk),",
    Root.DEALING: "A policy that deals requests over all micro-batches (scheduler=equal_time, scheduler.max_batch)",
    Root.RECOVERY: "Ranks that stand by (parallel.spares)",
    Root.OVERLOAD: "Requests at that rate, or more devices (parallel.pp, parallel.tp),",
    Root.SMALL_CHUNK: "A larger chunk (scheduler.chunk)",
    Root.PADDING: "A chunk whose micro-batches fill their tiles (scheduler.chunk)",
    Root.TENSOR_PARALLEL: "Stages that fit into a node (a smaller parallel.tp and a larger parallel.pp)",
    Root.LONG_PROMPTS: "A faster attention kernel, or shorter prompts,",
    Root.PREEMPTION: "More KV blocks (cache.num_blocks, hardware.memory_gib), or fewer requests at a time "
    "(scheduler.max_batch),",
    Root.CONTENTION: "Cores of its own for each rank (parallel.threads, fewer ranks, or nothing beside them)",
}


def _change(finding: Finding, policy: str | None) -> str:
    """Say what kind of change would help, and how much at most."""
    root, evidence = finding.root, finding.evidence
    if root == Root.SMALL_BATCH and evidence.get("waiting", 1.0) < 1:
        root = Root.FEW_REQUESTS
    elif root == Root.SMALL_BATCH and evidence.get("kv_share", 0.0) >= _KV_FULL:
        root = Root.KV_FULL
    if root == Root.FEW_REQUESTS:
        return "More requests at once would fill that time, or fewer devices (parallel.pp, parallel.tp) would do."
    if root == Root.FILL_DRAIN:
        if finding.where:
            return "Fewer such replicas, requests that are dealt more evenly, or a longer run would fill that time."
        return "A longer run has less of it."
    if root == Root.KV_FULL:
        return (
            "More KV blocks (cache.num_blocks, hardware.memory_gib), or more devices (parallel.pp, parallel.tp), would "
            "fill that time."
        )
    if root == Root.SMALL_BATCH:
        return "More requests at a time (scheduler.max_batch, scheduler.batch) would save most of that."
    what = _CHANGES.get(finding.root)
    if what is None:
        what = "A policy that evens out micro-batches (scheduler=equal_time)"
        if policy == "equal_time":
            what = "Micro-batches that are more alike (scheduler.chunk)"
    return f"{what} would save at most {percent_text(finding.share)} of the run."
