"""Figure 13: the cost of chunking a prefill, and throughput by chunk."""

from __future__ import annotations

from gapless.conf.schema import SimulateConfig
from gapless.runtime.analysis.drawing.chart import Axis
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape

from .artifact import Artifact, Relation, Row, Simulate
from .charts import line_chart
from .figure7 import PAPER as FIGURE_7
from .figure9 import gains
from .one_gpu import LLAMA_13B_BATCHES, IterationTimes, costs_of, iteration, sarathi
from .table2 import PAPER as TABLE_2

NAME = "Figure 13"
CHUNKS = (64, 128, 192, 256, 320, 384, 448, 512)
ATTENTION: dict[int, tuple[float, Relation]] = {64: (3.0, "=")}  # chunked over whole, by chunk
# The same of the whole prefill. The paper says "about" 5x, "more than" 2x, "within" 20% and 10%.
PREFILL: dict[int, tuple[float, Relation]] = {64: (5.0, "="), 128: (2.0, ">="), 256: (1.2, "<="), 512: (1.1, "<=")}
NAMES: dict[Relation, str] = {"=": "", ">=": ", at the least", "<=": ", at the most"}
GAINS = {64: 1.0, 128: 1.16}  # throughput over the baseline's, by chunk; the paper says "almost" and "up to"


def figure13(config: SimulateConfig, simulate: Simulate) -> Artifact:
    """Sum prefills chunk by chunk, and simulate whole runs at each chunk's best P:D ratio."""
    costs = costs_of(config)
    attention, whole = chunked_over_whole(costs)
    batch = LLAMA_13B_BATCHES[1024]
    policies = {str(chunk): sarathi(batch, chunk) for chunk in CHUNKS}
    by_ratio = gains(config, simulate, 1024, batch, policies)
    best = {chunk: max(by_ratio[str(chunk)].values()) for chunk in CHUNKS}

    rows = prefill_rows(attention, whole)
    for chunk, value in GAINS.items():
        setting = f"chunk {chunk}, 1K, B={batch}, at its best P:D ratio"
        rows.append(Row(NAME, "throughput over the baseline", setting, value, best[chunk]))
    setting = f"1K, B={batch}, each at its best P:D ratio"
    rows.append(Row(NAME, "throughput, chunk 256 over 320", setting, None, best[256] / best[320]))

    x, ratio, gain = Axis("chunk", "tokens"), Axis("ratio"), Axis("throughput over baseline", low=None)
    parts = (("a", "attention", attention), ("b", "prefill", whole))
    charts = [
        line_chart(
            f"figure13{letter}",
            f"Figure 13{letter}: {what}, chunked over whole",
            x,
            ratio,
            {f"{length // 1024}K": by_chunk for length, by_chunk in found.items()},
        )
        for letter, what, found in parts
    ]
    charts.append(line_chart("figure13c", "Figure 13c: throughput", x, gain, {"": best}))
    whole_ms = TABLE_2["prefill-only"][2]
    notes = (
        "The paper says of chunk 128 that its prefill is more than twice as slow, of 256 and 512 that they lose "
        "at most 20% and 10%; not at which lengths. Chunks are run as they are, whole tiles or not.",
        "Five times at a chunk of 64 is more than the paper's own numbers allow: if its 16 iterations took as long as "
        f"iterations of 128 tokens, {FIGURE_7[128]:.0f} ms (Figure 7), 1K would take "
        f"{16 * FIGURE_7[128] / whole_ms:.1f} times the {whole_ms} ms of the whole prompt (Table 2), and eight chunks "
        f"of 128 {8 * FIGURE_7[128] / whole_ms:.1f} times. Ours reads the keys and values of a prefix at the rate of "
        "memory, and its attention is launched once a chunk and layer; what else made the paper's attention three "
        "times as slow in chunks of 64 it does not say.",
    )
    return Artifact("Figure 13: the cost of chunks", tuple(rows), tuple(charts), notes)


def chunked_over_whole(costs: IterationTimes) -> tuple[dict[int, dict[int, float]], dict[int, dict[int, float]]]:
    """Return how many times longer attention and the whole prefill take in chunks, each by length and chunk."""
    attention, whole = dict[int, dict[int, float]](), dict[int, dict[int, float]]()
    for length in LLAMA_13B_BATCHES:
        base = chunked_prefill(costs, length, length)
        chunked = {chunk: chunked_prefill(costs, length, chunk) for chunk in CHUNKS}
        attention[length] = {chunk: parts["attn"] / base["attn"] for chunk, parts in chunked.items()}
        whole[length] = {chunk: sum(parts.values()) / sum(base.values()) for chunk, parts in chunked.items()}
    return attention, whole


def prefill_rows(attention: dict[int, dict[int, float]], whole: dict[int, dict[int, float]]) -> list[Row]:
    """Return the rows on prefills from the ratios of `chunked_over_whole`."""
    rows = []
    for quantity, paper, found in (("attention", ATTENTION, attention), ("prefill", PREFILL, whole)):
        for chunk, (value, relation) in paper.items():
            what = f"{quantity}, chunked over whole{NAMES[relation]}"
            for length, by_chunk in found.items():
                setting = f"chunk {chunk}, {length // 1024}K"
                rows.append(Row(NAME, what, setting, value, by_chunk[chunk], relation))
    return rows


def chunked_prefill(costs: IterationTimes, length: int, chunk: int) -> dict[str, float]:
    """Return the seconds of a prompt in chunks, by part of the iteration."""
    total = {"linear": 0.0, "attn": 0.0, "rest": 0.0}
    for start in range(0, length, chunk):
        size = min(chunk, length - start)
        shape = MicroBatchShape(((size, start),), sampled=1 if start + size == length else 0)
        for part, seconds in iteration(costs, shape).items():
            total[part] += seconds
    return total
