"""A fleet of simulated replicas behind a router, each with its own coordinator, scheduler and virtual clock."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from ...conf.policies import SchedulerConfig
from ...conf.sampling import SamplingParams
from ...conf.schema import SimulateConfig
from ..core.block_pool import BlockPool
from ..core.garbage_collection import without_collector
from ..core.request import Request
from ..core.run_record import RunRecord
from ..cost.make import make_control, make_costs
from ..cost.stage_costs import StageCosts
from ..engine.coordinator import Coordinator
from ..engine.plan import Plan, make_plan
from ..ledger.running_totals import RunningTotals
from ..scheduler.policies import make_scheduler
from ..workload import WorkItem, Workload
from .pipeline import Disturbance, SimulatedPipeline

_TOTALLED = 4096  # micro-batches at a time


class Replica:
    """One simulated pipeline and what drives it; its clock moves when it is told to."""

    def __init__(self, pipeline: SimulatedPipeline, policy: SchedulerConfig, plan: Plan, block_size: int) -> None:
        pool = BlockPool(plan.num_blocks, block_size, -(-plan.max_model_len // block_size))
        self.pipeline = pipeline
        self.max_model_len = plan.max_model_len
        self.coordinator = Coordinator(pipeline, make_scheduler(policy, plan.limits, pool), ends_only=True)
        self.totals: RunningTotals | None = None  # takes of the record what is over, now and then
        self.unfinished = 0
        self.queued_tokens = 0  # prompt and output tokens of unfinished requests, as they came

    @property
    def record(self) -> RunRecord:
        return self.coordinator.record

    @property
    def next_event(self) -> float:
        """When its next micro-batch ends; infinity where none is under way."""
        event = self.pipeline.next_event
        return math.inf if event is None else event

    def add(self, number: int, item: WorkItem, arrival: float) -> None:
        request = Request(
            number, item.prompt, _exactly(item.output_len), arrival=arrival, max_model_len=self.max_model_len,
            user=item.user, deadline=None if item.deadline is None else arrival + item.deadline,
        )  # fmt: skip
        self.coordinator.add(request)
        self.unfinished += 1
        self.queued_tokens += request.max_len

    def dispatch(self, now: float) -> None:
        """At `now`, after requests have come."""
        self.pipeline.clock.seconds = max(self.pipeline.clock.seconds, now)
        self.coordinator.dispatch()

    def step(self) -> int:
        """To its next event; the requests that ended there."""
        ended = self.collect()
        self.coordinator.dispatch()
        return ended

    def collect(self) -> int:
        """The same, where what the event makes admissible is not dispatched yet."""
        ended = 0
        for event in self.coordinator.collect(self.next_event):
            ended += 1
            self.queued_tokens -= event.request.max_len
        self.unfinished -= ended
        if self.totals is not None and len(self.record.micro_batches) >= _TOTALLED:
            self.totals.take(self.record)
        return ended

    def advance(self, until: float) -> int:
        """Through all events before `until`; the requests that ended."""
        ended = 0
        while self.next_event < until:
            ended += self.step()
        return ended


def make_replicas(
    config: SimulateConfig,
    *,
    repeat: int = 1,
    count: int | None = None,
    plan: Plan | None = None,
    costs: StageCosts | None = None,
) -> list[Replica]:
    """Replicas of the pipeline under the config's policy, nothing submitted to them.

    Args:
        repeat: of a run that is repeated, which one; each has disturbances of its own, and so has each replica.
        count: how many; None: as many as the config says.
        plan, costs: of the config, where they have been made.

    Raises:
        ConfigError: what does not fit.
    """
    simulation, parallel = config.simulation, config.parallel
    plan = plan or make_plan(config)
    costs, control = costs or make_costs(config, plan), make_control(config, plan.arch)
    nodes = [stage * parallel.tp // config.hardware.devices_per_node for stage in range(parallel.pp)]
    made = []
    for number in range(simulation.replicas if count is None else count):
        disturbance = Disturbance(
            simulation.jitter, simulation.straggler_rate, simulation.straggler_factor,
            seed=(config.seed + repeat - 1) * 1_000_003 + number,
        )  # fmt: skip
        pipeline = SimulatedPipeline(
            costs,
            depth=plan.limits.depth,
            num_blocks=plan.num_blocks,
            between_nodes=[a != b for a, b in pairwise(nodes)],
            scatter_gather=simulation.scatter_gather,
            overlap_sends=simulation.overlap_sends,
            dispatch_s=control.dispatch,
            result_s=control.result,
            turnaround_s=control.turnaround,
            disturbance=disturbance,
        )
        replica = Replica(pipeline, config.scheduler, plan, config.cache.block_size)
        if not simulation.record:
            replica.totals = RunningTotals(plan.limits.depth, config.slo)
        made.append(replica)
    return made


Router = Callable[[Sequence[Replica], int], int]  # replicas, the request's number: which replica takes it


def _round_robin(replicas: Sequence[Replica], number: int) -> int:
    return number % len(replicas)


def _least_requests(replicas: Sequence[Replica], number: int) -> int:
    return min(range(len(replicas)), key=lambda i: replicas[i].unfinished)


def _least_tokens(replicas: Sequence[Replica], number: int) -> int:
    return min(range(len(replicas)), key=lambda i: replicas[i].queued_tokens)


ROUTERS: dict[str, Router] = {
    "round_robin": _round_robin,
    "least_requests": _least_requests,
    "least_tokens": _least_tokens,
}


def run_fleet(
    replicas: Sequence[Replica],
    items: Iterable[WorkItem],
    *,
    router: str = "round_robin",
    max_concurrency: int | None = None,
) -> Iterator[int]:
    """Run `items`, in the order of their arrivals, to their ends; requests that have ended, as they do.

    While `max_concurrency` are unfinished the next is held back, and arrives when it is let in.

    Raises:
        PipelineError: a policy takes nothing though nothing is in flight.
    """
    with without_collector():
        yield from _run_fleet(replicas, items, ROUTERS[router], max_concurrency)


def _run_fleet(
    replicas: Sequence[Replica], items: Iterable[WorkItem], route: Router, max_concurrency: int | None
) -> Iterator[int]:
    unfinished = 0
    now = 0.0
    pending: set[int] = set()  # replicas that got requests at `now` and were not told to dispatch
    for number, item in enumerate(items):
        while max_concurrency is not None and unfinished >= max_concurrency:
            _dispatch(replicas, pending, now)
            first = min(range(len(replicas)), key=lambda i: replicas[i].next_event)
            if replicas[first].next_event == math.inf:
                for replica in replicas:
                    replica.coordinator.check_progress()
            now = max(now, replicas[first].next_event)
            ended = replicas[first].collect()
            pending.add(first)
            unfinished -= ended
            yield ended
        due = max(item.arrival, now)
        if due > now:
            _dispatch(replicas, pending, now)
            for replica in replicas:
                ended = replica.advance(due)
                unfinished -= ended
                yield ended
            now = due
        chosen = route(replicas, number)
        replicas[chosen].add(number, item, due)
        pending.add(chosen)
        unfinished += 1
    _dispatch(replicas, pending, now)
    for replica in replicas:
        while replica.unfinished:
            if replica.next_event == math.inf:
                replica.coordinator.check_progress()
            yield replica.step()
        while replica.next_event < math.inf:
            replica.step()


def simulated(config: SimulateConfig, workload: Workload) -> list[Replica]:
    """The replicas of the config after they have run `workload` to its end, each with its record.

    Raises:
        ConfigError: what does not fit.
        PipelineError: as `run_fleet`.
    """
    replicas = make_replicas(config)
    items, most = workload.without_prompts(), config.workload.max_concurrency
    for _ in run_fleet(replicas, items, router=config.simulation.router, max_concurrency=most):
        pass
    return replicas


def _dispatch(replicas: Sequence[Replica], pending: set[int], now: float) -> None:
    for index in pending:
        replicas[index].dispatch(now)
    pending.clear()


@lru_cache(maxsize=8192)
def _exactly(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)
