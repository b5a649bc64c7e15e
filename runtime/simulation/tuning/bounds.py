"""Bounds that no schedule beats: a setting's highest request rate and shortest tails, from stage times alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....conf.policies import SarathiConfig, SchedulerConfig, TokenBudgetConfig
from ....conf.tuning import TailSlo
from ...core.latencies import p99
from ...core.numbers import ms_text
from ..cost.operators import LAYER_LINEARS, Operators
from ..cost.stage_costs import MicroBatchShape, StageCosts
from ..pipeline.setting import Setting
from .demand import Demand

# Maximum number of tokens in a micro-batch if the policy sets none. GEMMs saturate with far fewer.
_UNLIMITED_TOKENS = 8192
# Sizes of micro-batches that are tried: each below _FINE_STEP, then fine steps, from _COARSE_FROM on coarse steps.
_FINE_STEP, _COARSE_STEP, _COARSE_FROM = 8, 64, 512
_SLACK = 1.05  # measured times do not rise strictly with the number of tokens
_MAX_PROMPT_LENGTHS = 64  # of more distinct prompt lengths, quantiles are used
_LARGE_BATCH = 256  # decodes per micro-batch at which attention per decode is about minimal

# Minimum seconds per token and layer, by operators, whether host overhead counts, and maximum size of a micro-batch.
TokenSeconds = dict[tuple[Operators, bool, int], float]


@dataclass(frozen=True, slots=True)
class Bound:
    """A request rate that no schedule exceeds.

    Attributes:
        rate: Requests/s; 0 if the SLO cannot be met at any rate.
        why: Why it is 0; empty otherwise.
    """

    rate: float
    why: str = ""


class Bounds:
    """Computes the bounds of settings for one demand."""

    def __init__(self, demand: Demand, slo: TailSlo, token_times: TokenSeconds | None = None) -> None:
        """Prepare the bounds for a demand.

        Args:
            demand: The requests.
            slo: Bounds of the tail latencies.
            token_times: Filled with times that do not depend on the demand, so that several `Bounds` can share them.
        """
        self._slo = slo
        self._inputs = demand.unit.input_lens.astype(np.float64)
        if demand.unit.prefixes is not None:  # the prefix cache may hold all but the last token
            self._inputs = np.ones_like(self._inputs)
        self._outputs = demand.unit.output_lens.astype(np.float64)
        self._num = len(demand)
        self._token_times: TokenSeconds = {} if token_times is None else token_times

    def __call__(self, setting: Setting) -> Bound:
        """Return the bound of a setting.

        Its rate is `throughput`, or 0 if a tail cannot meet the SLO at any rate.
        """
        ttft_ms, tbt_ms = self.floors_ms(setting)
        ttft, tbt = self._slo.ttft_p99_ms, self._slo.tbt_p99_ms
        if tbt is not None and tbt_ms > tbt:
            took = ms_text(tbt_ms)
            return Bound(
                0.0, f"a single decode takes {took} through the pipeline, above the TBT bound of {ms_text(tbt)}"
            )
        if ttft is not None and ttft_ms > ttft:
            took = ms_text(ttft_ms)
            return Bound(0.0, f"a stage takes {took} for a long prompt, above the TTFT bound of {ms_text(ttft)}")
        return Bound(self.throughput(setting))

    def floors_ms(self, setting: Setting) -> tuple[float, float]:
        """Return lower bounds of the p99 TTFT and TBT over all schedules of a setting, in milliseconds."""
        whole = setting.costs.whole_layers
        per_token = max(count * token for count, token in zip(whole, self._tokens_seconds(setting), strict=True))
        decode_s = _lone_decode(setting.costs) if self._outputs.max() > 1 else 0.0
        return p99(self._inputs) * per_token * 1e3, decode_s * 1e3

    def throughput(self, setting: Setting) -> float:
        """Return the requests/s that no schedule of a setting exceeds, whatever the SLO.

        It is the lowest of three rates, limited by the busiest stage, by the maximum number of running requests, and by
        the KV cache, which holds the prompts of running requests. For the last two, each request takes its minimum
        time.
        """
        costs = setting.costs
        token_s = self._tokens_seconds(setting)
        per_token = max(count * token for count, token in zip(costs.whole_layers, token_s, strict=True))
        # The last token of a request is sampled but not computed.
        tokens = float(self._inputs.sum() + self._outputs.sum()) - self._num
        busiest = max(
            count * (tokens * token + costs.scale * stretch * self._attention(source))
            for count, token, stretch, source in zip(
                costs.whole_layers, token_s, costs.stretches, costs.operators, strict=True
            )
        )
        by_work = self._num / busiest if busiest > 0 else math.inf  # 0: a lone layer skips unsampled rows
        decode_s = _lone_decode(costs)
        least_s = (self._outputs - 1) * decode_s + self._inputs * per_token  # from admission to the end, by request
        plan, mean_s, mean_token_s = setting.plan, float(least_s.mean()), float((self._inputs * least_s).mean())
        by_requests = plan.limits.running / mean_s if mean_s > 0 else by_work
        by_kv = plan.kv_tokens / mean_token_s if mean_token_s > 0 else by_work
        return _SLACK * setting.config.simulation.replicas * min(by_work, by_requests, by_kv)

    def _tokens_seconds(self, setting: Setting) -> list[float]:
        """Return a token's minimum seconds in a layer of each stage."""
        host, limit = setting.config.simulation.host, max_tokens(setting.config.scheduler, setting)
        costs = setting.costs
        return [costs.scale * self._token_seconds(source, host, limit) for source in costs.operators]

    def _attention(self, source: Operators) -> float:
        """Return a layer's attention seconds for all requests: prompts in one chunk each, decodes in large batches."""
        prompts, counts = np.unique(self._inputs.astype(np.int64), return_counts=True)
        if len(prompts) > _MAX_PROMPT_LENGTHS:
            # Quantiles rounded down, so that the bound stays a bound.
            quantiles = np.linspace(0, 1, _MAX_PROMPT_LENGTHS + 1)[:-1]
            prompts = np.quantile(self._inputs, quantiles, method="lower").astype(np.int64)
            counts = np.full(_MAX_PROMPT_LENGTHS, self._num / _MAX_PROMPT_LENGTHS)
        pairs = zip(prompts.tolist(), counts.tolist(), strict=True)
        chunks = sum(number * source.chunk_attention(length, 0) for length, number in pairs)
        decodes = int(self._outputs.sum()) - self._num
        if not decodes:
            return float(chunks)
        context = float(((self._outputs - 1) * (self._inputs + self._outputs / 2)).sum())
        each = source.decode_attention(_LARGE_BATCH, round(_LARGE_BATCH * context / decodes)) / _LARGE_BATCH
        return float(chunks) + decodes * each

    def _token_seconds(self, source: Operators, host: bool, limit: int) -> float:
        """Return a token's minimum seconds in a layer, without attention, in micro-batches of up to `limit` tokens."""
        key = source, host, limit
        if key not in self._token_times:
            tried = {
                *range(1, _FINE_STEP),
                *range(_FINE_STEP, _COARSE_FROM, _FINE_STEP),
                *range(_COARSE_FROM, limit, _COARSE_STEP),
                limit,
            }
            sizes = sorted(size for size in tried if size <= limit)
            # Times rise with the size, so a size between two tried ones takes at least as long as the smaller.
            times = (layer_seconds(source, size, host) for size in sizes)
            self._token_times[key] = min(t / (end - 1) for t, end in zip(times, [*sizes[1:], limit + 1], strict=True))
        return self._token_times[key]


def layer_seconds(source: Operators, num_tokens: int, host: bool) -> float:
    """Return the device's seconds for one layer over `num_tokens` tokens, without attention."""
    linear = sum(source.linear(name, num_tokens) for name in LAYER_LINEARS)
    stretch = source.host.stretch if host else 1.0
    beside = source.others(num_tokens) + source.routing(num_tokens)
    return stretch * (linear + beside + 2 * source.all_reduce(num_tokens))


def max_tokens(policy: SchedulerConfig, setting: Setting) -> int:
    """Return how many tokens a micro-batch of the policy can hold."""
    batch = setting.plan.limits.batch
    if isinstance(policy, SarathiConfig) and isinstance(policy.chunk, int):
        return max(policy.chunk, batch)
    if isinstance(policy, TokenBudgetConfig):
        return max(policy.max_batched_tokens, batch)
    return max(_UNLIMITED_TOKENS, batch)


def _lone_decode(costs: StageCosts) -> float:
    """Return the compute seconds of a single decode through all stages."""
    return sum(costs.seconds(MicroBatchShape(decodes=1, context=1, sampled=1)))


def slowest_stage(costs: StageCosts, shapes: Sequence[MicroBatchShape]) -> float:
    """Return the total seconds of the slowest stage over all `shapes`."""
    return float(np.sum([costs.seconds(shape) for shape in shapes], axis=0).max())
