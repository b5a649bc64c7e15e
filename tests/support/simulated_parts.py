"""Simulated pipelines of devices whose operators take round times, each step of them audited."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gapless.conf.architecture import Architecture
from gapless.conf.policies import POLICY_CONFIGS, Depth, SchedulerConfig
from gapless.conf.schema import ParallelConfig
from gapless.conf.simulation import FaultsConfig
from gapless.parallel.placement import StageLink
from gapless.runtime.core.messages import MicroBatchMessage, MicroBatchResult, SegmentMessage
from gapless.runtime.core.run_record import FaultRecord
from gapless.runtime.core.work_item import WorkItem
from gapless.runtime.engine.plan import Plan
from gapless.runtime.scheduler import Limits
from gapless.runtime.simulation.cost.operators import HostTimes, Linear
from gapless.runtime.simulation.cost.stage_costs import StageCosts
from gapless.runtime.simulation.pipeline.faults import RankFault
from gapless.runtime.simulation.pipeline.faulty_pipeline import FaultyPipeline
from gapless.runtime.simulation.pipeline.replicas import Replica, run_fleet
from gapless.runtime.simulation.pipeline.simulated_pipeline import SimulatedPipeline
from tests.support.virtual_pipeline import VirtualPipeline

R = TypeVar("R", bound=Replica)

BLOCK = 4
LONGEST = 120
ARCHITECTURE = Architecture(
    vocab_size=64,
    hidden_size=8,
    num_layers=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=16,
    max_position=LONGEST,
)
HOST = HostTimes(step=0.001)


@dataclass
class Device:
    """`Operators` whose times are round numbers, `slower` times as long."""

    slower: float = 1.0
    send_s: float = 0.0005
    host: HostTimes = HOST

    def linear(self, operator: Linear, rows: int) -> float:
        return self.slower * (0.0001 + 0.00002 * rows)

    def others(self, rows: int) -> float:
        return 0.0001 * self.slower

    def routing(self, rows: int) -> float:
        return 0.0

    def embedding(self, rows: int) -> float:
        return 0.0001 * self.slower

    def chunk_attention(self, length: int, prefix: int) -> float:
        return self.slower * 1e-6 * length * (prefix + length / 2)

    def chunks_attention(self, chunks: Sequence[tuple[int, int]]) -> float:
        return sum(self.chunk_attention(length, prefix) for length, prefix in chunks)

    def decode_attention(self, requests: int, context: int) -> float:
        return self.slower * 1e-6 * context

    def all_reduce(self, rows: int) -> float:
        return 0.0

    def send(self, rows: int, *, link: StageLink, scatter_gather: bool) -> float:
        return self.send_s * (1 + link.between_nodes) + 1e-6 * rows


class _Audit(SimulatedPipeline):
    """Fails on what a rank could not survive, and counts the micro-batches that are outstanding."""

    def __init__(self, costs: StageCosts, **how: Any) -> None:
        super().__init__(costs, **how)
        self.ranks = _Ranks(1, 1, self.num_blocks, BLOCK, lambda micro_batch, stage: 0.0)
        self.micro_batches: list[MicroBatchMessage] = []
        self.most = 0

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        self.micro_batches.append(micro_batch)
        assert micro_batch.epoch == self.ranks.epoch
        self.ranks.take(micro_batch)
        super().submit(micro_batch)
        self.most = max(self.most, len(self._results))

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        results = super().wait(deadline)
        for result in results:
            if result.sampled is not None:
                self.ranks.delivered(result.micro_batch)
        return results

    def restart(self, fault: FaultRecord) -> None:
        super().restart(fault)
        self.ranks.restart(fault)


class Audited(_Audit):
    """An audited pipeline that never fails."""


class AuditedFaulty(_Audit, FaultyPipeline):
    """An audited pipeline whose ranks fail."""

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        assert self._fault is None, "nothing is dispatched to a pipeline that does not stand"
        super().submit(micro_batch)


class _Ranks(VirtualPipeline):
    """The tables of a rank, where each token sampled is 0.

    With `receives` it may decode prompts that it has not prefilled.
    """

    receives = False

    def take(self, micro_batch: MicroBatchMessage) -> list[int]:
        if self.receives:
            for new in micro_batch.new:  # preempted before its first decode
                self._sampled.setdefault(new.request, [0])
            for decode in micro_batch.decodes:
                if decode.request not in self._sampled:  # its prompt's KV, and its first token, came from elsewhere
                    self._blocks[decode.request] = []
                    self._tokens[decode.request] = [0] * decode.start
                    self._prompt_len[decode.request] = decode.start
                    self._sampled[decode.request] = [0]
        return super().take(micro_batch)

    def _compute(self, segment: SegmentMessage) -> int:
        self._sampled[segment.request].append(0)
        return 0


def make_replica(
    policy: str | SchedulerConfig = "sarathi",
    *,
    layers: Sequence[int] = (2, 2),
    devices: Sequence[Device] | None = None,
    batch: int = 4,
    depth: int | None = None,
    num_blocks: int = 400,
    host: bool = True,
    faults: Iterable[RankFault] | None = None,
    times: FaultsConfig | None = None,
    spares: int = 0,
    max_recoveries: int = 1000,
    receives: bool = False,
    kind: Callable[[SimulatedPipeline, SchedulerConfig, Plan], R] = Replica,
    **how: Any,
) -> R:
    """Make a replica over an audited pipeline; `how` goes to it. With `faults` its stages have a rank each."""
    stages = len(layers)
    config = POLICY_CONFIGS[policy]() if isinstance(policy, str) else policy
    chosen = config.depth(stages) if depth is None else Depth(min(stages, depth), depth)
    device = Device()
    costs = StageCosts(layers, devices or [device] * stages, host=host)
    limits = Limits(batch, chosen, num_stages=stages)
    plan = Plan(ARCHITECTURE, tuple(range(n) for n in layers), num_blocks, BLOCK, False, limits, None)
    how |= {"depth": chosen.most, "num_blocks": num_blocks}
    if faults is None:
        audited = Audited(costs, **how)
        audited.ranks.receives = receives
        return kind(audited, config, plan)
    parallel = ParallelConfig(pp=stages, launcher="ray", spares=spares, max_recoveries=max_recoveries)
    pipeline = AuditedFaulty(costs, faults=iter(faults), times=times or FaultsConfig(), parallel=parallel, **how)
    return kind(pipeline, config, plan)


def items(*requests: tuple[int, int] | tuple[int, int, float]) -> list[WorkItem]:
    """Make requests of (prompt, output) or (prompt, output, arrival), in the order of their arrival."""
    each = sorted(((*request, 0.0)[:3] for request in requests), key=lambda request: request[2])
    return [WorkItem(bytes(prompt), output, arrival) for prompt, output, arrival in each]


def run(replicas: Replica | Sequence[Replica], work: Sequence[WorkItem], **how: Any) -> int:
    """All of `work` through a fleet; how many requests ended."""
    fleet = [replicas] if isinstance(replicas, Replica) else replicas
    return sum(run_fleet(fleet, work, **how))
