"""Figure 7: the cost of one token more than whole tiles (tile quantization)."""

from __future__ import annotations

from gapless.conf.schema import SimulateConfig
from gapless.runtime.analysis.drawing.chart import Axis

from .artifact import Artifact, Row, Simulate
from .charts import line_chart
from .one_gpu import IterationTimes, costs_of, prefill

NAME = "Figure 7"
PAPER = {128: 55.0, 256: 69.8, 257: 92.33}  # milliseconds of an iteration, by tokens
MAX_TOKENS = 640


def figure7(config: SimulateConfig, simulate: Simulate) -> Artifact:
    """Compute iterations of one prompt by the cost model."""
    costs = costs_of(config)
    times = {tokens: _milliseconds(costs, tokens) for tokens in range(1, MAX_TOKENS + 1)}
    lines = {"ours": times, "paper, three points": PAPER}
    chart = line_chart("figure7", "Figure 7: tile quantization", Axis("tokens"), Axis("iteration", "ms"), lines)
    return Artifact("Figure 7: tile quantization", tuple(rows(costs)), (chart,))


def rows(costs: IterationTimes) -> list[Row]:
    """Return the figure's rows."""
    ours = {tokens: _milliseconds(costs, tokens) for tokens in PAPER}
    return [
        *(Row(NAME, "an iteration (ms)", f"{tokens} tokens", paper, ours[tokens]) for tokens, paper in PAPER.items()),
        *(
            Row(NAME, f"{b} over {a} tokens", "an iteration", PAPER[b] / PAPER[a], ours[b] / ours[a])
            for a, b in ((128, 256), (256, 257))
        ),
    ]


def _milliseconds(costs: IterationTimes, tokens: int) -> float:
    return 1e3 * costs.seconds(prefill(tokens))[0]
