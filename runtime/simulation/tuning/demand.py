"""A workload at any request rate: the same requests in the same order, with scaled gaps; or a closed loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ....conf.errors import ConfigError
from ....conf.workloads import ShareGptConfig, TraceConfig, WorkloadConfig
from ....models.tokenizer import load_tokenizer
from ...engine.plan import Plan
from ..workload import Workload, make_workload

NUM_REQUESTS = 400  # if the config does not say how many
_MIN_REQUESTS = 20  # a p99 of fewer requests is merely the slowest one


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests that can arrive at any rate, or a closed loop, whose clients set the rate.

    Attributes:
        unit: The requests with arrivals at 1 request/s; for a closed loop, unscaled.
        clients: Number of closed-loop clients; None: open loop.
        own_rate: Request rate of the trace, in requests/s; None if arrivals are not from a trace.
    """

    unit: Workload
    own_rate: float | None = None
    clients: int | None = None

    def __len__(self) -> int:
        return len(self.unit)

    @property
    def num_gaps(self) -> int:
        """How many pairs of consecutive output tokens there are."""
        return int(self.unit.output_lens.sum()) - len(self)

    def at(self, rate: float) -> Workload:
        """Return the requests at `rate` requests/s; for a closed loop, unscaled."""
        if self.clients is not None:
            return self.unit
        return replace(self.unit, arrivals=self.unit.arrivals / rate)

    def sample(self, num: int) -> Demand:
        """Return `num` of the requests in arrival order, with the same distribution of prompt lengths.

        They arrive at the times of the first `num` requests.
        """
        if num >= len(self):
            return self
        unit = self.unit
        by_length = np.argsort(unit.input_lens, kind="stable")
        taken = np.sort(by_length[((np.arange(num) + 0.5) * len(self) / num).astype(np.int64)])
        part = replace(unit.part(taken, unit.arrivals[:num]), warmup=unit.warmup)
        return replace(self, unit=part)

    def config_at(self, config: WorkloadConfig, rate: float) -> WorkloadConfig:
        """Return a workload config that generates these requests at `rate` requests/s."""
        if config.duration_s is None:
            config = replace(config, num_prompts=len(self))
        if self.clients is not None:
            return config
        if isinstance(config, TraceConfig) and config.request_rate is None:
            assert self.own_rate is not None
            return replace(config, time_scale=config.time_scale * rate / self.own_rate)
        return replace(config, request_rate=rate)


def make_demands(config: WorkloadConfig, plan: Plan, context: int, seeds: int, more: int = 0) -> list[Demand]:
    """Make a demand for each of `seeds` seeds and for `more` that may follow. The first has the config's own seed.

    Other seeds draw other requests, or take other sections of a trace. If `request_rate` is null, a trace keeps its own
    arrivals, scaled to the rate, and no section repeats, so that a short trace gives fewer demands.

    Args:
        config: The workload.
        plan: Names the tokenizer and the vocabulary.
        context: Maximum tokens of a request, prompt and output.
        seeds: Number of demands that are always used.
        more: Number of further demands. For a trace, their sections are halfway between the others.

    Raises:
        ConfigError: The workload is not valid, or has too few requests for a p99.
    """
    encoder = load_tokenizer(plan.tokenizer, plan.arch.vocab_size)

    def make(workload: WorkloadConfig) -> Workload:
        return make_workload(workload, vocab_size=plan.arch.vocab_size, context=context, tokenizer=encoder)

    num = config.num_prompts or NUM_REQUESTS
    poisson = replace(config, request_rate=1.0)
    if config.max_concurrency is not None:
        own = config if config.duration_s is not None else replace(config, num_prompts=num)
        made = [make(replace(own, seed=config.seed + k)) for k in range(seeds + more)]
        demands = [Demand(workload, clients=config.max_concurrency) for workload in made]
    elif isinstance(config, TraceConfig):
        whole = make(replace(config, num_prompts=None, request_rate=None))
        if config.num_prompts is not None and config.num_prompts > len(whole):
            make(config)  # raises the error
        num = min(num, len(whole))
        starts = [round(share * (len(whole) - num)) for share in _places(seeds, more)]
        if config.request_rate is None:
            starts = list(dict.fromkeys(starts))
        found = [whole.part(slice(start, start + num)) for start in starts]
        if config.request_rate is None:
            demands = [_stretched(workload) for workload in found]
        else:
            drawn = [make(replace(poisson, seed=config.seed + k, num_prompts=num)).arrivals for k in range(len(starts))]
            demands = [Demand(replace(w, arrivals=times)) for w, times in zip(found, drawn, strict=True)]
    elif isinstance(config, ShareGptConfig) and config.num_prompts is None:
        demands = [Demand(make(replace(poisson, seed=config.seed + k)).part(slice(num))) for k in range(seeds + more)]
    else:
        demands = [Demand(make(replace(poisson, seed=config.seed + k, num_prompts=num))) for k in range(seeds + more)]
    if len(demands[0]) < _MIN_REQUESTS:
        raise ConfigError(f"workload.num_prompts={len(demands[0])}: must be at least {_MIN_REQUESTS} for a p99")
    return demands


def _places(even: int, more: int) -> list[float]:
    """Return `even` places spread evenly over [0, 1], then `more` halfway between neighbours."""
    places = [k / max(1, even - 1) for k in range(even)]
    while len(places) < even + more:
        known = sorted({0.0, *places, 1.0})
        places += [(a + b) / 2 for a, b in pairwise(known)]
    return places[: even + more]


def _stretched(workload: Workload) -> Demand:
    """Scale the arrivals of a trace to 1 request/s.

    Raises:
        ConfigError: All requests arrive at once.
    """
    span = float(workload.arrivals[-1])
    if span <= 0.0:
        raise ConfigError(
            "workload: all requests of the trace arrive at once; spread them with workload.request_rate=1"
        )
    rate = (len(workload) - 1) / span
    return Demand(replace(workload, arrivals=workload.arrivals * rate), rate)


def lengths(demands: Sequence[Demand]) -> tuple[float, float]:
    """Return the mean prompt and output lengths P and D, in tokens."""
    inputs = np.concatenate([demand.unit.input_lens for demand in demands])
    outputs = np.concatenate([demand.unit.output_lens for demand in demands])
    return float(inputs.mean()), float(outputs.mean())


def asked_rate(config: WorkloadConfig, demand: Demand) -> float | None:
    """Return the workload's own rate, in requests/s; None if it has none."""
    rate = config.request_rate
    if rate is None:
        return demand.own_rate
    return None if math.isinf(rate) else rate
