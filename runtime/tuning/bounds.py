"""What no schedule can beat: the most requests/s of a setting and its shortest tails, from stage times alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...conf.policies import SarathiConfig, SchedulerConfig, TokenBudgetConfig
from ...conf.tuning import TailSlo
from ..cost.operators import LAYER_LINEARS, Operators
from ..cost.stage_costs import MicroBatchShape, StageCosts
from ..report.text import milliseconds
from .demand import Demand
from .trial import Setting, tail

_MOST_ROWS = 8192  # of a micro-batch where the policy sets no bound; a matrix product is saturated long before
_FINE, _COARSE = 8, 64  # steps of the grid of rows, below and above
_CHANGE = 512
_SLACK = 1.05  # measured times do not rise strictly with the rows


TokenSeconds = dict[tuple[Operators, bool, int], float]  # by source, whether the host counts, most rows


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule carries more than `rate` requests/s; 0, and `why`, where the SLO cannot be met at any rate."""

    rate: float
    why: str = ""


class Bounds:
    """Bounds of settings for one demand. `known` keeps the least time of a token for other demands."""

    def __init__(self, demand: Demand, slo: TailSlo, known: TokenSeconds | None = None) -> None:
        self._slo = slo
        self._inputs = demand.unit.input_lens.astype(np.float64)
        self._outputs = demand.unit.output_lens.astype(np.float64)
        self._num = len(demand)
        self._token: TokenSeconds = {} if known is None else known

    def __call__(self, setting: Setting) -> Bound:
        costs = setting.costs
        replicas = setting.config.simulation.replicas
        decode_s = _traversal(costs, MicroBatchShape(decodes=1, context=1, sampled=1))
        tbt = self._slo.tbt_p99_ms
        if tbt is not None and self._outputs.max() > 1 and decode_s * 1e3 > tbt:
            took = milliseconds(decode_s * 1e3)
            return Bound(0.0, f"a single decode takes {took} through the stages, over the TBT of {milliseconds(tbt)}")
        token_s = [
            self._token_seconds(source, setting.config.simulation.host, most_rows(setting.config.scheduler, setting))
            for source in costs.operators
        ]
        per_token = max(count * token for count, token in zip(costs.layers, token_s, strict=True))
        ttft = self._slo.ttft_p99_ms
        long_prompt = tail(self._inputs)
        if ttft is not None and long_prompt * per_token * 1e3 > ttft:
            took = milliseconds(long_prompt * per_token * 1e3)
            return Bound(0.0, f"a stage takes {took} for a long prompt, over the TTFT of {milliseconds(ttft)}")
        # Work: the last token of a request is sampled but not computed.
        tokens = float(self._inputs.sum() + self._outputs.sum()) - self._num
        busiest = max(
            count * (tokens * token + self._attention(source))
            for count, token, source in zip(costs.layers, token_s, costs.operators, strict=True)
        )
        by_work = self._num / busiest
        # Residence: slots over the least time that a request holds one.
        held = float(self._outputs.mean() - 1) * decode_s + float(self._inputs.mean()) * per_token
        by_slots = setting.plan.limits.running / held if held > 0 else by_work
        return Bound(_SLACK * replicas * min(by_work, by_slots))

    def _attention(self, source: Operators) -> float:
        """Seconds of one layer for all requests: prompts in one chunk each; decodes in large batches."""
        prompts, counts = np.unique(self._inputs.astype(np.int64), return_counts=True)
        if len(prompts) > 64:  # by quantiles, each rounded down
            edges = np.quantile(self._inputs, np.linspace(0, 1, 65)[:-1], method="lower").astype(np.int64)
            prompts, counts = edges, np.full(64, self._num / 64)
        pairs = zip(prompts.tolist(), counts.tolist(), strict=True)
        chunks = sum(number * source.chunk_attention(length, 0) for length, number in pairs)
        decodes = int(self._outputs.sum()) - self._num
        if not decodes:
            return float(chunks)
        context = float(((self._outputs - 1) * (self._inputs + self._outputs / 2)).sum())
        large = 256
        each = source.decode_attention(large, round(large * context / decodes)) / large
        return float(chunks) + decodes * each

    def _token_seconds(self, source: Operators, host: bool, most: int) -> float:
        """Least seconds of one layer for a token, in micro-batches of up to `most` of them."""
        key = source, host, most
        if key not in self._token:
            grid = {*range(1, _FINE), *range(_FINE, _CHANGE, _FINE), *range(_CHANGE, most, _COARSE), most}
            rows = sorted(number for number in grid if number <= most)
            # Times rise with the rows, so those between two of the grid take no less than the lower one.
            times = (layer_seconds(source, number, host) for number in rows)
            self._token[key] = min(t / (end - 1) for t, end in zip(times, [*rows[1:], most + 1], strict=True))
        return self._token[key]


def layer_seconds(source: Operators, rows: int, host: bool) -> float:
    """One layer's operators over `rows` tokens, attention left out."""
    linear = sum(source.linear(name, rows) for name in LAYER_LINEARS)
    return linear + source.others(rows) + 2 * source.all_reduce(rows) + (source.layer_overhead if host else 0.0)


def most_rows(policy: SchedulerConfig, setting: Setting) -> int:
    """Most tokens of a micro-batch."""
    batch = setting.plan.limits.batch
    if isinstance(policy, SarathiConfig) and isinstance(policy.chunk, int):
        return max(policy.chunk, batch)
    if isinstance(policy, TokenBudgetConfig):
        return max(policy.budget, batch)
    return max(_MOST_ROWS, batch)


def _traversal(costs: StageCosts, shape: MicroBatchShape) -> float:
    return sum(costs.seconds(shape))


def slowest_stage(costs: StageCosts, shapes: Sequence[MicroBatchShape]) -> float:
    """Seconds of the stage that takes longest for `shapes` in turn."""
    return max(np.sum([costs.seconds(shape) for shape in shapes], axis=0).tolist())
