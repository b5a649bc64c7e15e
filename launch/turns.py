"""The runs of a comparison: policies and repeats in order, with labels, folders, plans and requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ..conf.build import to_mapping
from ..conf.policies import SchedulerConfig
from ..conf.schema import ComparisonConfig
from ..conf.workloads import WorkloadConfig

if TYPE_CHECKING:
    from ..runtime.engine.plan import Plan
    from ..runtime.simulation.workload import Workload


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of one policy; `folder` is relative to the comparison's folder."""

    label: str
    policy: SchedulerConfig
    repeat: int
    folder: str


def make_plans(config: ComparisonConfig) -> dict[SchedulerConfig, Plan]:
    """Make the plan of each policy of a comparison.

    Raises:
        ConfigError: as `make_plan`.
    """
    from ..runtime.engine.plan import make_plan

    several = policies(config)
    return {policy: make_plan(replace(config, scheduler=policy), quiet=policy != several[0]) for policy in several}


def requests(config: ComparisonConfig, plans: Mapping[SchedulerConfig, Plan] | None = None) -> tuple[Workload, int]:
    """Make the requests of a comparison; return them and the maximum tokens of one under any policy.

    Args:
        config: the comparison's config.
        plans: each policy's plan; None: they are made here.

    Raises:
        ConfigError: an invalid workload, or as `make_plan`.
    """
    of_policies = list((plans or make_plans(config)).values())
    context, plan = max(plan.room for plan in of_policies), of_policies[0]
    return requests_of(config.workload, plan.tokenizer, plan.arch.vocab_size, context), context


@lru_cache(maxsize=2)  # shared by the runs of a workload
def requests_of(workload: WorkloadConfig, tokenizer: str | None, vocab_size: int, context: int) -> Workload:
    """Make the requests of a workload, of at most `context` tokens; `tokenizer` is a path."""
    from ..models.tokenizer import load_tokenizer
    from ..runtime.simulation.workload import make_workload

    encoder = load_tokenizer(tokenizer, vocab_size)
    return make_workload(workload, vocab_size=vocab_size, context=context, tokenizer=encoder)


def expected(config: WorkloadConfig, workload: Workload) -> int | None:
    """Return the number of requests of a run; None if it is limited by time."""
    return len(workload) if config.duration_s is None else None


def policies(config: ComparisonConfig) -> tuple[SchedulerConfig, ...]:
    """Return the compared policies, at least one."""
    return config.policies or (config.scheduler,)


def turns(config: ComparisonConfig, *, interleave: bool) -> list[Turn]:
    """Return the runs in order: interleaved (a b a b), or one policy after the other (a a b b)."""
    named = list(zip(labels(policies(config)), policies(config), strict=True))
    if interleave:
        order = [(label, policy, repeat) for repeat in range(1, config.repeats + 1) for label, policy in named]
    else:
        order = [(label, policy, repeat) for label, policy in named for repeat in range(1, config.repeats + 1)]
    digits = max(2, len(str(len(order))))
    folders = [f"{n:0{digits}}_{re.sub(r'[^a-z0-9_=.-]+', '_', label)}" for n, (label, *_) in enumerate(order, 1)]
    if len(order) == 1:
        folders = [""]
    return [Turn(*each, folder) for each, folder in zip(order, folders, strict=True)]


def labels(compared: Sequence[SchedulerConfig]) -> list[str]:
    """Return a unique label for each policy.

    It is the policy's name, with the keys in which policies of the same name differ (`sarathi chunk=128`).
    """
    names: list[str] = []
    for policy in compared:
        alike = [to_mapping(other) for other in compared if other.name == policy.name]
        own = to_mapping(policy)
        differing = [key for key in own if any(other[key] != own[key] for other in alike)]
        names.append(
            " ".join([policy.name, *(f"{key}={'null' if own[key] is None else own[key]}" for key in differing)])
        )
    again = [names[:number].count(name) for number, name in enumerate(names)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(names, again, strict=True)]
