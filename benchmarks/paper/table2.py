"""Table 2: the cost of a token in a prefill-only, a decode-only and a decode-maximal batch."""

from __future__ import annotations

from gapless.conf.schema import SimulateConfig
from gapless.runtime.analysis.drawing.chart import Axis
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape

from .artifact import Artifact, Row, Simulate, number
from .charts import bar_chart
from .one_gpu import IterationTimes, costs_of, decode_maximal, decodes, iteration, prefill

NAME = "Table 2"
LENGTH = 1024
# The paper's milliseconds of linear operators, of attention and of both, by kind of batch.
PAPER = {
    "prefill-only": (224.8, 10.0, 234.8),
    "decode-only": (44.28, 5.68, 49.96),
    "decode-maximal": (223.2, 15.2, 238.4),
}
SETTINGS = {
    "prefill-only": "1 prompt of 1024",
    "decode-only": "4 decodes over 1024",
    "decode-maximal": "1021 prompt tokens, 3 decodes over 1024",
}


def table2(config: SimulateConfig, simulate: Simulate) -> Artifact:
    """Compute three iterations by the cost model; nothing is scheduled."""
    ours, rest = iterations(costs_of(config))
    bars = {
        f"{scheme}, {who}": {"linear": by[scheme][0], "attn": by[scheme][1]}
        for scheme in PAPER
        for who, by in (("paper", PAPER), ("ours", ours))
    }
    chart = bar_chart("table2", "Table 2: one iteration", Axis("time", "ms"), bars)
    notes = (
        "The table states 4 prompts of 1024, but its 0.229 ms per token is 234.8 ms over 1,024 tokens: one prompt, as "
        "here. The paper's total is linear operators and attention; all else (norms, activations, embedding, LM head) "
        f"takes {number(rest['prefill-only'])}, {number(rest['decode-only'])} and {number(rest['decode-maximal'])} ms "
        "more here.",
        "A decode of the decode-maximal batch costs what that batch takes beyond the prefill-only one, over three: in "
        "the paper a difference of 3.6 ms between iterations of 235 ms. Its linear operators took 1.6 ms less for "
        "1,024 tokens with decodes among them than without, which ours cannot; attention adds 5.2 ms there and "
        f"{number(ours['decode-maximal'][1] - ours['prefill-only'][1])} ms here.",
    )
    return Artifact("Table 2: a decode's cost, alone and with a chunk", tuple(rows(ours)), (chart,), notes)


def iterations(costs: IterationTimes) -> tuple[dict[str, tuple[float, float, float]], dict[str, float]]:
    """Return by kind of batch the milliseconds of linear operators, attention and both, and those of all else."""
    shapes: dict[str, MicroBatchShape] = {
        "prefill-only": prefill(LENGTH),
        "decode-only": decodes(4, LENGTH),
        "decode-maximal": decode_maximal(LENGTH - 3, 3, LENGTH),
    }
    ours, rest = {}, {}
    for scheme, shape in shapes.items():
        parts = iteration(costs, shape)
        linear, attn = 1e3 * parts["linear"], 1e3 * parts["attn"]
        ours[scheme], rest[scheme] = (linear, attn, linear + attn), 1e3 * parts["rest"]
    return ours, rest


def rows(ours: dict[str, tuple[float, float, float]]) -> list[Row]:
    """Return the table's rows from the milliseconds of `iterations`."""
    found = [
        Row(NAME, f"{scheme}: {quantity} (ms)", SETTINGS[scheme], paper, value)
        for scheme, by_part in ours.items()
        for quantity, paper, value in zip(("linear", "attn", "total"), PAPER[scheme], by_part, strict=True)
    ]
    alone = ours["decode-only"][2] / 4
    riding = (ours["decode-maximal"][2] - ours["prefill-only"][2]) / 3
    return [
        *found,
        Row(NAME, "a prefill token (ms)", "prefill-only", 0.229, ours["prefill-only"][2] / LENGTH),
        Row(NAME, "a decode (ms)", "decode-only", 12.49, alone),
        Row(NAME, "a decode (ms)", "decode-maximal", 1.2, riding),
    ]
