"""Figure 4: throughput of prefills and decodes in one layer, and the arithmetic intensity behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gapless.conf.architecture import Architecture
from gapless.conf.build import build, load_group, load_hardware
from gapless.conf.schema import HardwareConfig, ModelConfig, SimulateConfig
from gapless.models.memory import BYTES
from gapless.runtime.analysis.drawing.chart import Axis
from gapless.runtime.engine.plan import Plan, make_plan
from gapless.runtime.simulation.cost.operators import LAYER_LINEARS
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape, StageCosts
from gapless.runtime.simulation.pipeline.make_costs import make_operators

from .artifact import Artifact, Row, Simulate
from .charts import line_chart
from .one_gpu import IterationTimes, decodes, prefill

NAME = "Figure 4"
SATURATED_RATE = 180.0  # the paper's tokens/ms of a layer, from 512 prompt tokens on
CHUNK_256_LOSS = 0.125  # the paper's loss of throughput at a chunk of 256 (4.2)
SATURATING_BATCH = 256  # the paper's batch at which decodes saturate
INTENSITY_RATIO = 100.0  # prefill's intensity over a decode's, "more than two orders of magnitude"
GPT3_CHUNK = 256  # the chunk at which a layer of GPT-3, whole on one A100, peaks (4.2)
NEAR_PEAK = 0.95  # share of the highest throughput that counts as saturated
LENGTH = 1024
_ROOM_GIB = 1e6
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def figure4(config: SimulateConfig, simulate: Simulate) -> Artifact:
    """Compute one layer, as the paper profiles it, so that batches fit for which the whole model has no memory."""
    layer, plan = _one_layer(config, config.hardware)
    prompts = {tokens: throughput(layer, prefill(tokens), tokens) for tokens in TOKENS}
    batches = {batch: throughput(layer, decodes(batch, LENGTH), batch) for batch in BATCHES}
    a100 = replace(load_hardware("a100-80g"), attention="flash_attention")
    gpt3 = build(ModelConfig, load_group("model", "gpt3-175b"), "model")
    wide, _ = _one_layer(replace(config, model=gpt3), a100)
    chunks = {tokens: throughput(wide, prefill(tokens), tokens) for tokens in TOKENS}

    arch, element = plan.arch, BYTES[plan.dtype]
    first, then = (
        {operator: intensity(1) for operator, intensity in _intensities(arch, rows, element).items()}
        for rows in (LENGTH, 1)
    )
    least = min(first, key=lambda operator: first[operator] / then[operator])
    one = f"a layer of {config.model.name} on {config.hardware.name}"
    rows = [
        *layer_rows(one, prompts, batches),
        Row(
            NAME,
            "arithmetic intensity, prefill over decode, at the least",
            f"batch 1, {LENGTH} tokens: {least}",
            INTENSITY_RATIO,
            first[least] / then[least],
            ">=",
        ),
        gpt3_row("a layer of GPT-3 on an A100", chunks),
    ]
    charts = (
        line_chart(
            "figure4a",
            "Figure 4a: throughput of a layer",
            Axis("tokens of a batch"),
            Axis("tokens/ms"),
            {"prefill": prompts, f"decodes over {LENGTH}": batches, "prefill, GPT-3 on A100": chunks},
        ),
        line_chart(
            "figure4b",
            "Figure 4b: arithmetic intensity of decodes",
            Axis("batch"),
            Axis("FLOPs/byte"),
            {
                operator: {batch: intensity(batch) for batch in BATCHES}
                for operator, intensity in _intensities(arch, 1, element).items()
            },
        ),
    )
    notes = (
        f"Saturated means {NEAR_PEAK:.0%} of the highest throughput, of powers of two up to {max(TOKENS):,} prompt "
        f"tokens or {max(BATCHES):,} decodes; the paper reads it off its plot. Intensities follow from the shapes of "
        "Table 1: FLOPs over the bytes of weights, inputs, outputs, keys and values.",
    )
    return Artifact("Figure 4: throughput and arithmetic intensity of a layer", tuple(rows), charts, notes)


def layer_rows(one: str, prompts: dict[int, float], batches: dict[int, float]) -> list[Row]:
    """Return the rows of a layer from its throughput by prompt tokens and by decodes; `one` names the layer."""
    peak, what = max(prompts.values()), f"least batch of decodes at {NEAR_PEAK:.0%} of their peak"
    saturating = min(batch for batch, rate in batches.items() if rate >= NEAR_PEAK * max(batches.values()))
    return [
        Row(NAME, "prefill (tokens/ms)", f"{one}, 512 tokens", SATURATED_RATE, prompts[512]),
        Row(NAME, "prefill (tokens/ms)", f"{one}, 1024 tokens", SATURATED_RATE, prompts[1024]),
        Row(NAME, "prefill at 256 tokens, share of the peak", one, 1 - CHUNK_256_LOSS, prompts[256] / peak),
        Row(NAME, what, f"{one}, {LENGTH} of context", SATURATING_BATCH, saturating),
    ]


def gpt3_row(one: str, chunks: dict[int, float]) -> Row:
    """Return the row of a layer of GPT-3, which `one` names, from its throughput by prompt tokens."""
    what = f"prefill at {GPT3_CHUNK} tokens, share of the peak"
    return Row(NAME, what, one, 1.0, chunks[GPT3_CHUNK] / max(chunks.values()))


def _one_layer(config: SimulateConfig, hardware: HardwareConfig) -> tuple[StageCosts, Plan]:
    """Return a layer on a device of any memory, and the plan that it is of."""
    plan = make_plan(replace(config, hardware=replace(hardware, memory_gib=_ROOM_GIB)))
    return StageCosts([1], [make_operators(config, hardware, plan)], host=False, last_layer="all"), plan


def throughput(layer: IterationTimes, shape: MicroBatchShape, tokens: int) -> float:
    """Return the throughput of a layer alone, in tokens/ms."""
    parts = layer.breakdown(shape, 0)
    seconds = sum(parts[name] for name in (*LAYER_LINEARS, "attn", "others", "all_reduce"))
    return tokens / seconds / 1e3


def _intensities(arch: Architecture, length: int, element: int) -> dict[str, Callable[[int], float]]:
    """Return for each operator a function from batch to arithmetic intensity, in FLOPs/byte.

    Args:
        arch: The model.
        length: Tokens of each prompt; 1: decodes with a context of `LENGTH` tokens.
        element: Bytes of a number.
    """
    H, N, K, D = arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim
    gate = 2 if arch.gated_ffn else 1
    shapes = {
        "preproj": (H, (N + 2 * K) * D),
        "postproj": (N * D, H),
        "ffn_ln1": (H, gate * arch.ffn_size),
        "ffn_ln2": (arch.ffn_size, H),
    }

    def linear(inputs: int, outputs: int) -> Callable[[int], float]:
        def intensity(batch: int) -> float:
            rows = batch * length
            return 2 * rows * inputs * outputs / (element * (inputs * outputs + rows * (inputs + outputs)))

        return intensity

    def attention(batch: int) -> float:
        pairs = length * (length + 1) / 2 if length > 1 else LENGTH  # of a query and a key
        cached = length if length > 1 else LENGTH
        return 4 * pairs * N * D / (element * (2 * cached * K * D + 2 * length * N * D))

    return {name: linear(*shape) for name, shape in shapes.items()} | {"attn": attention}
