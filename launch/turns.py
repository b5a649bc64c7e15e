"""What a comparison runs, in which order, and what it is called: policies, repeats, their folders and requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ..conf.build import to_mapping
from ..conf.policies import SchedulerConfig
from ..conf.schema import ComparisonConfig
from ..conf.workloads import WorkloadConfig

if TYPE_CHECKING:
    from ..runtime.workload import Workload


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of one policy; `folder` is relative to the benchmark's own."""

    label: str
    policy: SchedulerConfig
    repeat: int
    folder: str


def requests(config: ComparisonConfig) -> tuple[Workload, int]:
    """The requests of a comparison, and the most tokens that one may come to under any of its policies.

    Raises:
        ConfigError: of the workload, the checkpoint or the memory.
    """
    from ..runtime.engine.plan import make_plan

    plans = [make_plan(replace(config, scheduler=policy)) for policy in policies(config)]
    arch, blocks = plans[0].arch, max(plan.num_blocks for plan in plans)
    context = min(arch.max_position, blocks * config.cache.block_size)
    return _requests(config.workload, plans[0].tokenizer, arch.vocab_size, context), context


@lru_cache(maxsize=2)  # made to check them, and again to run them
def _requests(workload: WorkloadConfig, tokenizer: str | None, vocab_size: int, context: int) -> Workload:
    from ..models.tokenizer import load_tokenizer
    from ..runtime.workload import make_workload

    encoder = load_tokenizer(tokenizer, vocab_size)
    return make_workload(workload, vocab_size=vocab_size, context=context, tokenizer=encoder)


def policies(config: ComparisonConfig) -> tuple[SchedulerConfig, ...]:
    """What is compared; at least one."""
    return config.policies or (config.scheduler,)


def turns(config: ComparisonConfig, *, interleave: bool) -> list[Turn]:
    """What runs, in this order: with `interleave` by turns (a b a b), else one after the other (a a b b)."""
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
    """Names of policies, with the keys in which those of one name differ: `sarathi chunk=128`; each unique."""
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
