"""The numbers that show a root of idle time in a run, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from ..core.micro_batch_columns import Floats, Ints
from ..core.run_record import RunRecord
from ..ledger.causes import Cause
from ..ledger.ledger import Ledger
from .hops import hops_of
from .roots import Root

Evidence = dict[str, float]
_UNEVEN = 1.15  # times the load of the busiest expert on other stages, from which on routing is named as a cause
_MOST = 2 / 3  # of the seconds for which ranks waited for a processor, from which on those of one stage are the cause


def evidence_of(root: Root, cause: Cause | None, record: RunRecord, ledger: Ledger) -> tuple[int | None, Evidence]:
    """Collect the numbers of a root, and the stage on which it begins where these show it.

    Args:
        root: whose numbers are wanted.
        cause: the ledger's, of most of the idle time.
        record: of the run.
        ledger: of the same record.

    Returns:
        Numbers by name. `low` and `high` are the 2nd and the 98th percentile, over micro-batches, of what `cause`
        compares; names that end in `_s` are seconds.
    """
    if root == Root.MICRO_BATCHES and cause is not None:
        prompts = np.array([request.prompt_tokens for request in record.requests], np.int64)
        return None, _of_micro_batches(cause, ledger) | {"prompt": _median(prompts)}
    if root == Root.TRANSPORT:
        return _of_transport(record, ledger)
    if root == Root.CONTENTION:
        return _contended_stage(ledger), {}
    found = _OTHERS.get(root)
    return None, {} if found is None else found(record, ledger)


def _of_micro_batches(cause: Cause, ledger: Ledger) -> Evidence:
    """Return what micro-batches that differ hold: prompt tokens, KV tokens of decodes, or KV tokens before chunks."""
    held = ledger.micro_batches
    has_prompt = held.prefill > 0
    found: Evidence = {"with_prompts": int(has_prompt.sum()), "without": int((~has_prompt).sum())}
    compared: Ints = held.prefill[has_prompt]
    if cause == Cause.PB3_DECODE_CONTEXT:
        compared = held.context[~has_prompt]
        found["decodes"] = _median(held.decodes[~has_prompt])
    elif cause == Cause.STAGE_IMBALANCE:
        compared = held.chunk_prefix[has_prompt]
    if len(compared):
        found["low"], found["high"] = np.percentile(compared, [2, 98]).tolist()
        found["median"] = _median(compared)
    return found


def _of_transport(record: RunRecord, ledger: Ledger) -> tuple[int | None, Evidence]:
    """Return the link that held up the stage behind it the most: how long it took, with how many tokens."""
    moved = sum(w.end - w.start for m in record.micro_batches for w in m.waits if w.reason == "kv_transfer")
    found: Evidence = {"kv_transfer_s": moved} if moved else {}
    hop = max(hops_of(ledger), key=lambda each: each.waited, default=None)
    if hop is None:
        return None, found
    return hop.stage, found | {"link_s": hop.median, "tokens": hop.tokens, "tokens_per_s": hop.tokens_per_s}


def of_experts(stage: int, record: RunRecord) -> Evidence:
    """Return how uneven the load of a slow stage's experts was; nothing where it was about the same on the others."""
    routed = [span for span in record.spans if span.expert_load]
    own, others = ([span.expert_load for span in routed if (span.stage == stage) == is_own] for is_own in (True, False))
    if not own or not others or np.mean(own) < _UNEVEN * np.mean(others):
        return {}
    hot = Counter((span.hot_layer, span.hot_expert) for span in routed if span.stage == stage)
    (layer, expert), _ = hot.most_common(1)[0]
    loads = {"expert_load": float(np.mean(own)), "expert_load_of_others": float(np.mean(others))}
    return loads | {"hot_layer": layer, "hot_expert": expert}


def _contended_stage(ledger: Ledger) -> int | None:
    """Return the stage that waited for a processor for most of the seconds in which any did; None: several did."""
    waited = ledger.contended + [ledger.seconds_by_cause(stage)[Cause.CONTENTION] for stage in range(ledger.num_stages)]
    stage = int(waited.argmax())
    return stage if len(waited) > 1 and waited[stage] >= _MOST * waited.sum() else None


def _of_control(record: RunRecord, ledger: Ledger) -> Evidence:
    idle, count = ledger.idle_columns[0], len(ledger.lanes[0].row)
    late = (idle.cause == Cause.CONTROL.code) & (idle.place >= 0)
    seconds = np.bincount(idle.place[late], idle.seconds[late], count)
    seconds = seconds[seconds > 0]
    return {"late": len(seconds), "micro_batches": count, "late_s": _median(seconds)} if len(seconds) else {}


def _of_few_requests(record: RunRecord, ledger: Ledger) -> Evidence:
    arrivals = np.sort(np.array([request.arrival for request in record.requests], np.float64))
    apart = float(arrivals[-1] - arrivals[0]) if len(arrivals) > 1 else 0.0
    rate: Evidence = {"requests_per_s": (len(arrivals) - 1) / apart} if apart > 0 else {}
    running, waiting = while_in_flight(ledger)
    return {"running": running, "waiting": waiting} | rate


def while_in_flight(ledger: Ledger) -> tuple[float, float]:
    """Return how many requests ran and how many waited while all that ran were in flight and stage 0 was idle.

    They are medians by time, and 0 without such time.
    """
    idle, lane = ledger.idle_columns[0], ledger.lanes[0]
    is_one = (idle.cause == Cause.STARVED_IN_FLIGHT.code) & (idle.place >= 0)
    places = ledger.micro_batches.places(lane.micro_batch[idle.place[is_one]])
    _, running, waiting = ledger.micro_batches.counters[places].T
    return _median_by(idle.seconds[is_one], running), _median_by(idle.seconds[is_one], waiting)


def _median_by(seconds: Floats, values: Ints) -> float:
    if not len(seconds):
        return 0.0
    order = np.argsort(values, kind="stable")
    until = np.cumsum(seconds[order])
    return float(values[order][np.searchsorted(until, until[-1] / 2)])


def _of_requests(record: RunRecord, ledger: Ledger) -> Evidence:
    counters = ledger.micro_batches.counters
    if not len(counters):
        return {}
    used, running, waiting = counters.mean(axis=0).tolist()
    found: Evidence = {"running": running, "waiting": waiting}
    if record.num_blocks:
        found |= {"kv_share": used / record.num_blocks, "blocks": record.num_blocks}
    return found


def _of_recovery(record: RunRecord, ledger: Ledger) -> Evidence:
    ends = [ledger.t1 if fault.up is None else fault.up for fault in record.faults]
    longest = max((end - fault.since for end, fault in zip(ends, record.faults, strict=True)), default=0.0)
    return {"faults": len(record.faults), "longest_s": longest}


def _median(values: Floats | Ints) -> float:
    return float(np.median(values)) if len(values) else 0.0


_OTHERS: dict[Root, Callable[[RunRecord, Ledger], Evidence]] = {
    Root.CONTROL: _of_control,
    Root.FEW_REQUESTS: _of_few_requests,
    Root.DEALING: _of_few_requests,
    Root.KV_FULL: _of_requests,
    Root.RECOVERY: _of_recovery,
    Root.FILL_DRAIN: lambda record, ledger: {"micro_batches": len(record.micro_batches)},
    Root.DEPTH: lambda record, ledger: {"depth": record.depth},
}
