"""Relative times of layers, including embedding and LM head, for balancing stages."""

from __future__ import annotations

from functools import cache

from ....conf.architecture import Architecture, LayerKind
from ....conf.sampling import SamplingParams
from ....conf.schema import ChatConfig, ComparisonConfig, EngineConfig, GenerateConfig, ServeConfig, SimulateConfig
from ....conf.workloads import FixedConfig
from ....kernels.weight_format import WeightFormat
from ....models.quantization.formats import ModelFormats
from ..cost.analytic import AnalyticOperators
from ..cost.cpu_core import cpu_core, sampled_row_seconds
from ..cost.stage_costs import MicroBatchShape, StageCosts
from ..workload.fixed import typical

_ROWS = 256  # per micro-batch with prompt tokens
# Prompt and output tokens per request if no workload specifies them, and decodes per micro-batch.
_TYPICAL = {"cuda": (1024, 128, 64), "cpu": (128, 128, 16)}
_DRAWN = SamplingParams(temperature=1.0)  # typical of requests to a server


def layer_times(
    config: EngineConfig, arch: Architecture, formats: ModelFormats, dtype_bytes: int, replicate_embedding: bool
) -> list[float]:
    """Return the seconds that each layer adds to a request; the first includes the embedding, the last the LM head.

    The cost model predicts them from the layer's kind and weight format. For hardware without costs it uses those of a
    CPU core, including sampling: only the ratios matter.
    """
    hardware, parallel = config.hardware, config.parallel

    @cache
    def operators(kind: LayerKind, format: WeightFormat | None) -> AnalyticOperators:
        return AnalyticOperators(
            arch,
            parallel.tp,
            hardware.costs or cpu_core(dtype_bytes),
            dtype_bytes,
            cluster=config.cluster,
            replicate_embedding=replicate_embedding,
            attention=hardware.attention,
            expert_parallel=parallel.expert_parallel,
            layers=format,
            head=formats.head,
            cache_dtype=config.cache.dtype,
            kind=kind,
        )

    each = [operators(arch.kind(layer), own.fc1) for layer, own in enumerate(formats.layers)]
    computed = config.simulation.last_layer if isinstance(config, SimulateConfig) else "sampled"
    costs, times = StageCosts([1] * len(each), each, host=False, last_layer=computed), [0.0] * len(each)
    row = 0.0 if hardware.costs else sampled_row_seconds(arch.vocab_size, _sampling(config)) / parallel.tp
    for count, shape in _micro_batches(config, arch.max_position):
        times = [time + count * seconds for time, seconds in zip(times, costs.seconds(shape), strict=True)]
        times[-1] += count * shape.sampled * row
    return times


def _micro_batches(config: EngineConfig, context: int) -> list[tuple[float, MicroBatchShape]]:
    """Return the micro-batches that compute a request in a full pipeline, as (count, shape).

    Decodes are batched with the prompt's chunks; decode-only micro-batches compute the rest.
    """
    prompt, output, decodes = _TYPICAL[config.hardware.device]
    if isinstance(config, ComparisonConfig) and isinstance(config.workload, FixedConfig):
        prompt, output = typical(config.workload)
    if isinstance(config.scheduler.batch, int):
        decodes = min(decodes, config.scheduler.batch)
    prompt, output = min(prompt, context), min(output, context)
    chunk = min(_ROWS - decodes, prompt)
    attended = decodes * min(context, prompt + output // 2)
    sampled = decodes + round(chunk / prompt)
    mixed = MicroBatchShape([(chunk, (prompt - chunk) // 2)], decodes, attended, sampled)
    alone = MicroBatchShape(decodes=decodes, context=attended, sampled=decodes)
    return [(prompt / chunk, mixed), (max(0.0, output / decodes - prompt / chunk), alone)]


def _sampling(config: EngineConfig) -> SamplingParams:
    if isinstance(config, GenerateConfig | ChatConfig):
        return config.sampling
    return _DRAWN if isinstance(config, ServeConfig) else SamplingParams()
