"""A workload at any request rate: the same requests in the same order, their gaps stretched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...conf.errors import ConfigError
from ...conf.workloads import ShareGptConfig, TraceConfig, WorkloadConfig
from ...models.tokenizer import load_tokenizer
from ..engine.plan import Plan
from ..workload import Workload, make_workload

NUM_REQUESTS = 400  # where the config does not say how many
_FEWEST = 20  # a p99 of fewer is its slowest request and no more


@dataclass(frozen=True, slots=True)
class Demand:
    """`unit`: the requests as they come at 1 request/s. `own_rate`: of the trace itself, requests/s."""

    unit: Workload
    own_rate: float | None = None

    def __len__(self) -> int:
        return len(self.unit)

    @property
    def num_gaps(self) -> int:
        """Pairs of consecutive tokens."""
        return int(self.unit.output_lens.sum()) - len(self)

    def at(self, rate: float) -> Workload:
        return replace(self.unit, arrivals=self.unit.arrivals / rate)

    def sample(self, num: int) -> Demand:
        """Of `num` of its requests, whose prompts are as long as all are, the longest too; in their order, at its first
        arrivals."""
        if num >= len(self):
            return self
        unit = self.unit
        by_length = np.argsort(unit.input_lens, kind="stable")
        taken = np.sort(by_length[((np.arange(num) + 0.5) * len(self) / num).astype(np.int64)])
        part = replace(
            unit,
            input_lens=unit.input_lens[taken],
            output_lens=unit.output_lens[taken],
            arrivals=unit.arrivals[:num],
            prompts=None if unit.prompts is None else [unit.prompts[number] for number in taken.tolist()],
        )
        return Demand(part, self.own_rate)

    def config_at(self, config: WorkloadConfig, rate: float) -> WorkloadConfig:
        """The workload's config that gives these requests at that rate."""
        config = replace(config, num_prompts=len(self))
        if isinstance(config, TraceConfig) and config.request_rate is None:
            assert self.own_rate is not None
            return replace(config, time_scale=config.time_scale * rate / self.own_rate)
        return replace(config, request_rate=rate)


def make_demands(config: WorkloadConfig, plan: Plan, context: int, seeds: int) -> list[Demand]:
    """One for each of `seeds` seeds: other draws, or of a trace other stretches of it; the first is the config's own.

    A trace keeps its own arrivals, faster or slower, where `request_rate` is null.

    Args:
        context: most tokens of a request.

    Raises:
        ConfigError: of the workload; or it has too few requests for a p99.
    """
    encoder = load_tokenizer(plan.tokenizer, plan.arch.vocab_size)

    def make(workload: WorkloadConfig) -> Workload:
        return make_workload(workload, vocab_size=plan.arch.vocab_size, context=context, tokenizer=encoder)

    num = config.num_prompts or NUM_REQUESTS
    poisson = replace(config, request_rate=1.0)
    if isinstance(config, TraceConfig):
        whole = make(replace(config, num_prompts=None, request_rate=None))
        if config.num_prompts is not None and config.num_prompts > len(whole):
            make(config)  # which says so
        num = min(num, len(whole))
        starts = [round(k * (len(whole) - num) / max(1, seeds - 1)) for k in range(seeds)]
        found = [_part(whole, start, start + num) for start in starts]
        if config.request_rate is None:
            demands = [_stretched(workload) for workload in found]
        else:
            drawn = [make(replace(poisson, seed=config.seed + k, num_prompts=num)).arrivals for k in range(seeds)]
            demands = [Demand(replace(w, arrivals=times)) for w, times in zip(found, drawn, strict=True)]
    elif isinstance(config, ShareGptConfig) and config.num_prompts is None:
        demands = [Demand(_part(make(replace(poisson, seed=config.seed + k)), 0, num)) for k in range(seeds)]
    else:
        made = (make(replace(poisson, seed=config.seed + k, num_prompts=num)) for k in range(seeds))
        demands = [Demand(workload) for workload in made]
    if len(demands[0]) < _FEWEST:
        raise ConfigError(f"workload.num_prompts={len(demands[0])}: must be {_FEWEST} or more, for a p99 of them")
    return demands


def _stretched(workload: Workload) -> Demand:
    """A trace's own arrivals, at 1 request/s."""
    span = float(workload.arrivals[-1])
    if span <= 0.0:
        raise ConfigError("workload: all requests of the trace come at once; give workload.request_rate=1 for gaps")
    rate = (len(workload) - 1) / span
    return Demand(replace(workload, arrivals=workload.arrivals * rate), rate)


def _part(workload: Workload, start: int, stop: int) -> Workload:
    arrivals = workload.arrivals[start:stop]
    return replace(
        workload,
        input_lens=workload.input_lens[start:stop],
        output_lens=workload.output_lens[start:stop],
        arrivals=arrivals - arrivals[:1],
        prompts=None if workload.prompts is None else workload.prompts[start:stop],
    )


def lengths(demands: Sequence[Demand]) -> tuple[float, float]:
    """Mean P and D."""
    inputs = np.concatenate([demand.unit.input_lens for demand in demands])
    outputs = np.concatenate([demand.unit.output_lens for demand in demands])
    return float(inputs.mean()), float(outputs.mean())


def asked_rate(config: WorkloadConfig, demand: Demand) -> float | None:
    """Requests/s that the workload itself comes at; None where it names none."""
    rate = config.request_rate
    if rate is None:
        return demand.own_rate
    return None if math.isinf(rate) else rate
