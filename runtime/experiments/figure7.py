"""Figure 7: the cost of one token more than whole tiles (tile quantization)."""

from __future__ import annotations

import numpy as np

from ...conf.schema import SimulateConfig
from ..report.chart import Axis, Chart, Series, series_colour
from .artifact import Artifact, Row, Simulate
from .one_gpu import IterationTimes, costs_of, prefill

NAME = "Figure 7"
PAPER = {128: 55.0, 256: 69.8, 257: 92.33}  # milliseconds of an iteration, by tokens
MAX_TOKENS = 640


def figure7(config: SimulateConfig, simulate: Simulate) -> Artifact:
    """Compute iterations of one prompt by the cost model."""
    costs = costs_of(config)
    tokens = np.arange(1, MAX_TOKENS + 1, dtype=np.float64)
    times = np.array([_milliseconds(costs, int(count)) for count in tokens])
    chart = Chart(
        "figure7", "Figure 7: tile quantization", "lines", Axis("tokens"), Axis("iteration", "ms"),
        (
            Series("ours", tokens, times, series_colour(0)),
            Series("paper, three points", np.array(list(PAPER), np.float64), np.array(list(PAPER.values())),
                   series_colour(1)),
        ),
    )  # fmt: skip
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
