"""Shared by the single-GPU experiments (5.1, 5.2, 5.4): iterations by the cost model, and runs of equal requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from gapless.conf.policies import OrcaWorstConfig, SarathiConfig, SchedulerConfig
from gapless.conf.schema import SimulateConfig
from gapless.conf.workloads import FixedConfig
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.simulation.cost.operators import LAYER_LINEARS
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape, StageCosts
from gapless.runtime.simulation.pipeline.make_costs import make_costs

from .artifact import Simulate

CHUNK = 256  # tokens, in all experiments with a fixed chunk (5.1.2, 5.3)
# By length of requests: the largest batches that fit LLaMA-13B on an A6000 at 1K, 2K and 3K (Figure 11).
LLAMA_13B_BATCHES = {1024: 18, 2048: 10, 3072: 6}


class IterationTimes(Protocol):
    """The seconds of one stage's iterations: `StageCosts` predicts them, `benchmarks/gpu` measures them."""

    def seconds(self, shape: MicroBatchShape) -> list[float]:
        """Return the seconds of an iteration, as a list of one stage."""
        ...

    def breakdown(self, shape: MicroBatchShape, stage: int) -> dict[str, float]:
        """Return the seconds by operator over all layers; they sum to the iteration's time."""
        ...


def costs_of(config: SimulateConfig) -> StageCosts:
    """Return the costs of the single stage of `config`.

    Raises:
        ConfigError: the model does not fit, or the hardware has no costs.
    """
    return make_costs(config, make_plan(config))


def iteration(costs: IterationTimes, shape: MicroBatchShape) -> dict[str, float]:
    """Return the seconds of one iteration: `linear` and `attn` of all layers, as in Table 2, and `rest`, all else."""
    parts = costs.breakdown(shape, 0)
    linear, attn = sum(parts[name] for name in LAYER_LINEARS), parts["attn"]
    return {"linear": linear, "attn": attn, "rest": sum(parts.values()) - linear - attn}


def prefill(tokens: int, requests: int = 1) -> MicroBatchShape:
    """Return the shape of `requests` whole prompts of `tokens` tokens each."""
    return MicroBatchShape(((tokens, 0),) * requests, sampled=requests)


def decodes(requests: int, context: int) -> MicroBatchShape:
    """Return the shape of `requests` decodes with a context of `context` tokens each."""
    return MicroBatchShape((), requests, requests * context, requests)


def decode_maximal(chunk: int, requests: int, context: int) -> MicroBatchShape:
    """Return the shape of a chunk that is not a prompt's last, and of `requests` decodes that ride along."""
    return MicroBatchShape(((chunk, 0),), requests, requests * context, requests)


def decode_speedup(costs: IterationTimes, batch: int, length: int) -> float:
    """Return how much cheaper a decode is that rides along with a chunk, compared with a decode-only batch.

    The time of a decode that rides along is the difference between a decode-maximal batch and a prefill-only batch with
    the same chunk, divided by its batch - 1 decodes (5.1.1). The chunk is shortened by the decodes (4.4).

    Args:
        costs: Seconds of the stage.
        batch: Requests in a batch.
        length: Context of each decode, in tokens.
    """
    riding = batch - 1
    prompt = CHUNK - riding
    alone = costs.seconds(decodes(batch, length))[0] / batch
    mixed, lone = decode_maximal(prompt, riding, length), MicroBatchShape(((prompt, 0),))
    extra = sum(iteration(costs, mixed)[part] - iteration(costs, lone)[part] for part in ("linear", "attn", "rest"))
    return alone / (extra / riding)


def balanced(batch: int, chunk: int = CHUNK) -> float:
    """Return the P:D ratio at which chunks and the decodes that ride along end together: C / (B - 1) (5.1.3)."""
    return chunk / (batch - 1)


def full_batches(config: SimulateConfig) -> int:
    """Return the number of full baseline batches of a run."""
    return max(1, (config.workload.num_prompts or 100) // max(LLAMA_13B_BATCHES.values()))


def equal_requests(config: SimulateConfig, length: int, ratio: float, batch: int) -> SimulateConfig:
    """Return the config with a workload of equal requests that make `full_batches` full batches.

    Args:
        config: The config.
        length: P + D of each request, in tokens.
        ratio: P:D.
        batch: Requests of a batch.
    """
    outputs = min(length - 1, max(1, round(length / (1 + ratio))))
    number = batch * full_batches(config)
    workload = FixedConfig(
        num_prompts=number, input_len=length - outputs, output_len=outputs, seed=config.workload.seed
    )
    return replace(config, workload=workload)


def baseline(batch: int) -> SchedulerConfig:
    """Return the paper's baseline (5.1): prefill-only and decode-only batches, the same as `orca_worst` (5.2)."""
    return OrcaWorstConfig(batch=batch)


def sarathi(batch: int, chunk: int = CHUNK) -> SchedulerConfig:
    """Return the paper's policy: chunk and decodes together are C tokens; a prompt's last chunk is what is left."""
    return SarathiConfig(batch=batch, chunk=chunk, tile=1)


def run_policy(config: SimulateConfig, policy: SchedulerConfig, simulate: Simulate, name: str) -> RunRecord:
    """Simulate a policy on one GPU; `name` is shown with the progress."""
    (record,) = simulate(replace(config, scheduler=policy), f"{policy.name} {name}")
    return record


def makespan(record: RunRecord) -> float:
    """Return the seconds from the first arrival to the end of the last compute."""
    return Ledger(record).span_seconds


def operator_seconds(record: RunRecord, costs: StageCosts) -> dict[str, float]:
    """Return the seconds of a one-stage run by operator."""
    total: dict[str, float] = {}
    for micro_batch in record.micro_batches:
        for part, seconds in costs.breakdown(MicroBatchShape.of_record(micro_batch), 0).items():
            total[part] = total.get(part, 0.0) + seconds
    return total
