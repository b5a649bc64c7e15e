"""What the single-GPU experiments (5.1, 5.2, 5.4) share: iterations by the cost model, runs of alike requests."""

from __future__ import annotations

from dataclasses import replace

from ...conf.policies import OrcaBestConfig, OrcaWorstConfig, SarathiConfig, SchedulerConfig
from ...conf.schema import SimulateConfig
from ...conf.workloads import FixedConfig
from ..core.run_record import MicroBatchRecord, RunRecord
from ..cost.make import make_costs
from ..cost.operators import LAYER_LINEARS
from ..cost.stage_costs import MicroBatchShape, StageCosts
from ..engine.plan import make_plan
from ..ledger.ledger import Ledger
from .artifact import Simulate

CHUNK = 256  # of all experiments that do not vary it (5.1.2, 5.3)
# The largest batches that fit LLaMA-13B on an A6000 at 1K, 2K and 3K (Figure 11).
LLAMA_13B_BATCHES = {1024: 18, 2048: 10, 3072: 6}


def costs_of(config: SimulateConfig) -> StageCosts:
    """Seconds of the one stage that `config` describes.

    Raises:
        ConfigError: the model does not fit, or nothing is known of the hardware's times.
    """
    return make_costs(config, make_plan(config))


def iteration(costs: StageCosts, shape: MicroBatchShape) -> dict[str, float]:
    """Seconds of one iteration: `linear` and `attn` of all layers, as Table 2 has them, and `rest`: all else."""
    parts = costs.breakdown(shape, 0)
    linear, attn = sum(parts[name] for name in LAYER_LINEARS), parts["attn"]
    return {"linear": linear, "attn": attn, "rest": sum(parts.values()) - linear - attn}


def prefill(tokens: int, requests: int = 1) -> MicroBatchShape:
    """Whole prompts of `tokens` each."""
    return MicroBatchShape(((tokens, 0),) * requests, sampled=requests)


def decodes(requests: int, context: int) -> MicroBatchShape:
    """A token of each of `requests`, over `context` tokens each."""
    return MicroBatchShape((), requests, requests * context, requests)


def decode_maximal(chunk: int, requests: int, context: int) -> MicroBatchShape:
    """A chunk in the midst of a prompt, and the decodes that ride along."""
    return MicroBatchShape(((chunk, 0),), requests, requests * context, requests)


def decode_speedup(costs: StageCosts, batch: int, length: int, chunk: int = CHUNK) -> float:
    """Time of a decode in a decode-only batch of `batch` over that of one that rides along with a chunk.

    The latter is the difference between a decode-maximal batch and a prefill-only one of the same chunk, over its
    batch - 1 decodes (5.1.1). The chunk is shortened by the decodes (4.4).
    """
    riding = batch - 1
    prompt = chunk - riding
    alone = costs.seconds(decodes(batch, length))[0] / batch
    mixed, lone = decode_maximal(prompt, riding, length), MicroBatchShape(((prompt, 0),))
    extra = sum(iteration(costs, mixed)[part] - iteration(costs, lone)[part] for part in ("linear", "attn", "rest"))
    return alone / (extra / riding)


def balanced(batch: int, chunk: int = CHUNK) -> float:
    """The P:D ratio at which decodes ride along with chunks and neither is left over: C / (B - 1) (5.1.3)."""
    return chunk / (batch - 1)


def full_batches(config: SimulateConfig) -> int:
    """Of the baseline, in a run."""
    return max(1, (config.workload.num_prompts or 100) // max(LLAMA_13B_BATCHES.values()))


def alike(config: SimulateConfig, length: int, ratio: float, batch: int) -> SimulateConfig:
    """Requests of `length` tokens, P + D, at a P:D ratio: as many full batches as `workload.num_prompts` make of the
    largest batch, one at the least."""
    outputs = min(length - 1, max(1, round(length / (1 + ratio))))
    number = batch * full_batches(config)
    workload = FixedConfig(
        num_prompts=number, input_len=length - outputs, output_len=outputs, seed=config.workload.seed
    )
    return replace(config, workload=workload)


def baseline(batch: int) -> SchedulerConfig:
    """The paper's baseline (5.1): prefill-only and decode-only batches; `orca_worst` is the same (5.2)."""
    return OrcaWorstConfig(batch=batch)


def orca_best(batch: int) -> SchedulerConfig:
    return OrcaBestConfig(batch=batch)


def sarathi(batch: int, chunk: int = CHUNK) -> SchedulerConfig:
    """The paper's: chunk and decodes together are C tokens, and a prompt's last chunk is all that is left of it."""
    return SarathiConfig(batch=batch, chunk=chunk, tile=1)


def run(config: SimulateConfig, policy: SchedulerConfig, simulate: Simulate, name: str) -> RunRecord:
    """One policy on one GPU."""
    (record,) = simulate(replace(config, scheduler=policy), f"{policy.name} {name}")
    return record


def makespan(record: RunRecord) -> float:
    """Seconds from the first arrival to the last compute."""
    return Ledger(record).span_seconds


def operator_seconds(record: RunRecord, costs: StageCosts) -> dict[str, float]:
    """Seconds of the whole run by operator, of its one stage."""
    total: dict[str, float] = {}
    for micro_batch in record.micro_batches:
        for part, seconds in costs.breakdown(shape_of(micro_batch), 0).items():
            total[part] = total.get(part, 0.0) + seconds
    return total


def shape_of(micro_batch: MicroBatchRecord) -> MicroBatchShape:
    """What a recorded micro-batch asked of a stage."""
    chunks = tuple((chunk.tokens, chunk.start) for chunk in micro_batch.chunks)
    return MicroBatchShape(chunks, micro_batch.decode_tokens, micro_batch.decode_context, micro_batch.sampled_rows)
