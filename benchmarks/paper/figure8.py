"""Figure 8: the speedup of decodes piggybacked on a chunk, by batch and sequence length."""

from __future__ import annotations

from gapless.conf.schema import SimulateConfig
from gapless.runtime.analysis.drawing.chart import Axis

from .artifact import Artifact, Row, Simulate
from .charts import line_chart
from .one_gpu import CHUNK, LLAMA_13B_BATCHES, costs_of, decode_speedup

NAME = "Figure 8"


def figure8(config: SimulateConfig, simulate: Simulate) -> Artifact:
    """Compute iterations by the cost model, up to the largest batch of each length."""
    costs = costs_of(config)
    found = {
        length: {batch: decode_speedup(costs, batch, length) for batch in range(2, largest + 1)}
        for length, largest in LLAMA_13B_BATCHES.items()
    }
    title, lines = f"Figure 8: decode speedup, chunk {CHUNK}", {f"{each // 1024}K": by for each, by in found.items()}
    chart = line_chart("figure8", title, Axis("batch"), Axis("speedup"), lines)
    notes = (
        "The time of a decode in a decode-only batch over what it adds to a prefill-only batch of the same chunk "
        "(5.1.1). The paper gives the range and not the batches that it holds for; here they go from 2 to "
        + ", ".join(f"{batch} at {length // 1024}K" for length, batch in LLAMA_13B_BATCHES.items())
        + ". "
        "The paper's least, 2.8, is above its own Table 4, which has 2.51 at 3K and batch 6.",
    )
    return Artifact("Figure 8: decode speedup", tuple(rows(found)), (chart,), notes)


def rows(found: dict[int, dict[int, float]]) -> list[Row]:
    """Return the figure's rows from the speedups by length and batch."""
    speedups = [(value, length, batch) for length, by in found.items() for batch, value in by.items()]
    return [
        Row(NAME, quantity, f"here at {length // 1024}K, B={batch}", paper, value)
        for quantity, paper, (value, length, batch) in (
            ("decode speedup, largest", 10.0, max(speedups)),
            ("decode speedup, least", 2.8, min(speedups)),
        )
    ]
