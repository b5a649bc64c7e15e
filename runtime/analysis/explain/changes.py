"""Candidate changes of a run's setting: config keys with new values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ....conf.build import value_text
from ....conf.policies import POLICY_CONFIGS, SchedulerConfig
from ....conf.schema import SimulateConfig
from ...core.run_record import RunRecord
from ...simulation.pipeline.setting import Setting
from ..ledger.causes import Cause
from ..ledger.ledger import Ledger

CHUNK_KEYS = ("chunk", "max_batched_tokens", "max_prefill_tokens")  # prompt tokens of a micro-batch
_LEAST_CHUNK, _MOST_CHUNK = 16, 8192
_SIZES = (2, 4, 0.5, 8, 16, 32, 1)  # chunk sizes to try, as multiples of the run's own
_FULL = 0.9  # share of B, or of the KV blocks, that counts as exhausted


@dataclass(frozen=True, slots=True)
class Change:
    """Config keys set to other values.

    Attributes:
        family: the aspect it changes.
        values: plain values by dotted key, as for `Twin.changed`. `scheduler` is the name of a policy.
    """

    family: str
    values: Mapping[str, Any] = field(hash=False)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The changes as command-line overrides."""
        return tuple(f"{key}={value_text(value)}" for key, value in self.values.items())

    @property
    def label(self) -> str:
        """The overrides for display: without unambiguous group prefixes, and without nulls among other values."""
        shown = {key: value for key, value in self.values.items() if value is not None} or self.values
        return " ".join(
            f"{key.removeprefix('scheduler.').removeprefix('parallel.')}={value_text(value)}"
            for key, value in shown.items()
        )


@dataclass(frozen=True, slots=True)
class Shown:
    """What a run's record shows, used to skip changes that cannot matter.

    Attributes:
        chunk: median prompt tokens of micro-batches that have some.
        most_requests: most requests in one micro-batch.
        has_queue: requests waited for admission.
        kv_full: the KV cache was full: requests waited for it, or were preempted.
    """

    chunk: int
    most_requests: int
    has_queue: bool
    kv_full: bool

    @classmethod
    def of(cls, record: RunRecord, ledger: Ledger) -> Shown:
        """Collect what the record of a run and its ledger show."""
        batches = record.micro_batches
        chunks = [tokens for each in batches if (tokens := each.prefill_tokens)]
        idle = ledger.seconds_by_cause()[Cause.STARVED_KV_FULL] > 0
        peak = max((each.kv_blocks_used for each in batches), default=0)
        preempted = any(request.preemptions for request in record.requests)
        return cls(
            chunk=round(median(chunks)) if chunks else 0,
            most_requests=max((len(each.chunks) + len(each.decodes) for each in batches), default=0),
            has_queue=any(each.num_waiting for each in batches),
            kv_full=(idle or preempted) and peak >= _FULL * record.num_blocks,
        )


def candidates(setting: Setting, shown: Shown) -> Iterator[Change]:
    """Yield the changes of a setting that may matter; within a family the likeliest first.

    Some may not fit or may not be predictable: making their setting then raises an error.
    """
    config, limits = setting.config, setting.plan.limits
    policy, pp, tp = config.scheduler, config.parallel.pp, config.parallel.tp
    yield from (with_policy(policy, name) for name in reversed(POLICY_CONFIGS) if name != policy.name)
    yield from _chunks(policy, shown)
    yield from _own_keys(policy)
    for depth in range(pp, pp + 3):
        if (limits.depth.least, limits.depth.most) != (depth, depth):
            yield Change("depth", {"parallel.depth": depth})
    for other_tp in range(1, pp * tp + 1):
        if other_tp != tp and pp * tp % other_tp == 0:
            yield Change("grid", _grid(config, pp * tp // other_tp, other_tp))
    if shown.has_queue:
        for order in ("fcfs", "shortest_prompt", "relative_slack"):
            if order != policy.order:
                yield Change("order", {"scheduler.order": order})
    yield from _admission(setting, shown)


def with_policy(policy: SchedulerConfig, name: str) -> Change:
    """Return the change to another policy, with its defaults and the run's own chunk size."""
    own, key = chunk_key(policy), chunk_key(POLICY_CONFIGS[name]) if name in POLICY_CONFIGS else None
    values: dict[str, Any] = {"scheduler": name}
    shared = ("chunk", "max_batched_tokens")  # the other key bounds a batch of prompts
    if own in shared and key in shared:
        chunk = getattr(policy, own)
        if chunk != "auto" or key == "chunk":
            values[f"scheduler.{key}"] = chunk
    return Change("policy", values)


def _chunks(policy: SchedulerConfig, shown: Shown) -> Iterator[Change]:
    key = chunk_key(policy)
    if key is None:
        return
    value = getattr(policy, key)
    base = max(_LEAST_CHUNK, shown.chunk) if value == "auto" else int(value)
    if key == "chunk" and value != "auto":
        yield Change("chunk", {"scheduler.chunk": "auto"})
    for size in (round(base * factor) for factor in _SIZES):
        if size != value and min(_LEAST_CHUNK, base) <= size <= max(_MOST_CHUNK, 2 * base):
            yield Change("chunk", {f"scheduler.{key}": size})


def _own_keys(policy: SchedulerConfig) -> Iterator[Change]:
    """Yield changes of policy-specific keys."""
    if (iterations := getattr(policy, "iterations", None)) is not None:
        yield Change("iterations", {"scheduler.iterations": max(1, iterations // 2)})
        yield Change("iterations", {"scheduler.iterations": 2 * iterations})


def _grid(config: SimulateConfig, pp: int, tp: int) -> dict[str, Any]:
    """Return the keys of another PP x TP grid. Per-stage settings of the old one are reset."""
    parallel = config.parallel
    of_stages = {"layers": parallel.layers, "stage_speeds": parallel.stage_speeds, "depth": parallel.depth}
    reset = {f"parallel.{key}": None for key, value in of_stages.items() if value is not None}
    return {"parallel.pp": pp, "parallel.tp": tp, **reset}


def _admission(setting: Setting, shown: Shown) -> Iterator[Change]:
    policy, most = setting.config.scheduler, setting.plan.limits.batch
    key = "scheduler.max_batch" if policy.batch is None else "scheduler.batch"
    if shown.most_requests >= _FULL * most:
        yield Change("admission", {key: 2 * most})
    if shown.most_requests >= 4:
        yield Change("admission", {key: shown.most_requests // 2})
    if shown.kv_full and setting.config.cache.num_blocks is not None:
        yield Change("memory", {"cache.num_blocks": None})


def chunk_key(policy: SchedulerConfig | type[SchedulerConfig]) -> str | None:
    """Return the key that bounds the prompt tokens per micro-batch of a policy; None if it has none."""
    names = policy.__dataclass_fields__
    return next((key for key in CHUNK_KEYS if key in names), None)
