"""Figure 3: the cost of a prefill token and of a decode by operator, at several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

from gapless.conf.schema import SimulateConfig
from gapless.runtime.analysis.drawing.chart import Axis
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape

from .artifact import Artifact, Row, Simulate
from .charts import bar_chart
from .one_gpu import IterationTimes, costs_of, decodes, prefill

NAME = "Figure 3"
LENGTH = 1024
BATCHES = (1, 2, 4, 8, 12, 18)
RATIOS = {1: 200.0, 2: 100.0, 18: 16.7}  # a decode's cost over a prefill token's, by batch
OPERATORS = ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2", "others")
MAX_OTHERS = 0.05  # share of `others` in a block's time


def figure3(config: SimulateConfig, simulate: Simulate) -> Artifact:
    """Compute iterations of the transformer blocks alone, without embedding and LM head."""
    first, then = seconds_of_a_token(costs_of(config))
    charts = tuple(
        bar_chart(
            f"figure3{letter}",
            f"Figure 3: a token of a {name}",
            Axis("time", "ms"),
            {f"batch {batch}": {part: 1e3 * each for part, each in parts.items()} for batch, parts in by_batch.items()},
        )
        for letter, name, by_batch in (("a", "prefill", first), ("b", "decode", then))
    )
    notes = (
        f"All 40 layers at {LENGTH} tokens a request. A prefill token costs "
        f"{1e3 * _sum(first[1]):.3f} ms at batch 1 and {1e3 * _sum(first[18]):.3f} ms at batch 18. "
        "`others` are norms, rotary embedding, activation, residuals and writes to the cache, each a kernel of its own "
        "at the speed of memory; what the paper counts among them it does not say.",
    )
    return Artifact("Figure 3: cost of a prefill token and of a decode", tuple(rows(first, then)), charts, notes)


def seconds_of_a_token(
    costs: IterationTimes, batches: Sequence[int] = BATCHES
) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]]:
    """Return the seconds of a prefill token and of a decode, by batch and operator."""
    first = {batch: _seconds_per_token(costs, prefill(LENGTH, batch), batch * LENGTH) for batch in batches}
    then = {batch: _seconds_per_token(costs, decodes(batch, LENGTH), batch) for batch in batches}
    return first, then


def rows(first: dict[int, dict[str, float]], then: dict[int, dict[str, float]]) -> list[Row]:
    """Return the figure's rows for the batches of `seconds_of_a_token`."""
    found = [
        Row(NAME, "a decode over a prefill token", f"batch {batch}", paper, _sum(then[batch]) / _sum(first[batch]))
        for batch, paper in RATIOS.items()
        if batch in first
    ]
    shares = {
        f"{name} batch {batch}": parts["others"] / _sum(parts)
        for name, by_batch in (("prefill,", first), ("decode,", then))
        for batch, parts in by_batch.items()
    }
    largest = max(shares, key=lambda setting: shares[setting])
    return [*found, Row(NAME, "share of others in a block, at the most", largest, MAX_OTHERS, shares[largest], "<=")]


def _seconds_per_token(costs: IterationTimes, shape: MicroBatchShape, tokens: int) -> dict[str, float]:
    parts = costs.breakdown(shape, 0)
    return {operator: parts[operator] / tokens for operator in OPERATORS}


def _sum(parts: dict[str, float]) -> float:
    return sum(parts.values())
