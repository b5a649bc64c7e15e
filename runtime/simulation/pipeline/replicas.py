"""A fleet of simulated replicas behind a router, each with its own coordinator, scheduler and virtual clock."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from ....conf.policies import SchedulerConfig
from ....conf.workloads import SloConfig, WorkloadConfig
from ....parallel.placement import stage_links
from ...core.garbage_collection import without_collector
from ...core.run_record import RunRecord
from ...core.stage_floor import StageFloor
from ...core.work_item import WorkItem
from ...engine.clients import Clients
from ...engine.coordinator import Coordinator, StopCheck
from ...engine.plan import Plan
from ...engine.replay import make_request
from ...scheduler.policies import make_scheduler
from .faults import draw_faults
from .faulty_pipeline import FaultyPipeline
from .setting import Setting
from .simulated_pipeline import Disturbance, SimulatedPipeline

_MICRO_BATCHES_PER_TOTAL = 4096


class RunTotals(Protocol):
    """Accumulates finished work and drops it from the record; implemented by the ledger's `RunningTotals`."""

    def take(self, record: RunRecord) -> None:
        """Count the completed micro-batches and the ended requests of `record`, and drop them from it."""

    def summary(self, record: RunRecord) -> dict[str, Any]:
        """Return the contents of `summary.json` for the whole run."""


MakeTotals = Callable[[int, SloConfig], RunTotals]  # from the depth and the SLO


class Replica:
    """One simulated pipeline with its coordinator and scheduler. Its clock moves only through these methods."""

    def __init__(
        self,
        pipeline: SimulatedPipeline,
        policy: SchedulerConfig,
        plan: Plan,
        stop_check: StopCheck | None = None,
        floors: list[StageFloor] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.max_model_len = plan.max_model_len
        self.cache_block = plan.block_size if plan.prefix_caching else None
        scheduler = make_scheduler(policy, plan.limits, plan.make_pool())
        self.coordinator = Coordinator(pipeline, scheduler, stop_check=stop_check, ends_only=True, floors=floors)
        self.totals: RunTotals | None = None  # if set, finished work moves there from the record
        self.unfinished = 0
        self.queued_tokens = 0  # prompt and output tokens of unfinished requests

    @property
    def record(self) -> RunRecord:
        """The record of the run so far."""
        return self.coordinator.record

    @property
    def next_event(self) -> float:
        """The time of the pipeline's next event, such as the end of a micro-batch; infinity if there is none."""
        event = self.pipeline.next_event
        return math.inf if event is None else event

    def add(self, number: int, item: WorkItem, arrival: float) -> None:
        """Submit an item as request `number`, which was sent at `arrival`, in seconds on the clock of the replica."""
        request = make_request(number, item, arrival, self.max_model_len, self.cache_block)
        self.coordinator.add(request)
        self.unfinished += 1
        self.queued_tokens += request.max_len

    def dispatch(self, now: float) -> None:
        """Advance the clock to `now` and dispatch the admissible work."""
        self.pipeline.clock.seconds = max(self.pipeline.clock.seconds, now)
        self.coordinator.dispatch()

    def step(self) -> int:
        """Advance to the next event and dispatch; return the number of requests that ended."""
        ended = self.collect()
        self.coordinator.dispatch()
        return ended

    def collect(self) -> int:
        """Advance to the next event without a dispatch; return the number of requests that ended."""
        ended = 0
        for event in self.coordinator.collect(self.next_event):
            ended += 1
            self.queued_tokens -= event.request.max_len
        self.unfinished -= ended
        if self.totals is not None and len(self.record.micro_batches) >= _MICRO_BATCHES_PER_TOTAL:
            self.totals.take(self.record)
        return ended

    def advance(self, until: float, clients: Clients) -> int:
        """Advance through all events before `until`, and notify the clients; return the number of ended requests."""
        ended = 0
        while (at := self.next_event) < until:
            if number := self.step():
                clients.answered(at, number)
                ended += number
        return ended


def make_replicas(setting: Setting, *, repeat: int = 1, make_totals: MakeTotals | None = None) -> list[Replica]:
    """Make the idle replicas of a setting.

    Args:
        setting: shared by all replicas.
        repeat: number of the run, from 1; each run and each replica draws its own disturbances and faults.
        make_totals: makes the totals of runs without `simulation.record`; None: every replica keeps its record.
    """
    config, plan = setting.config, setting.plan
    made = []
    for pipeline in make_pipelines(setting, repeat=repeat):
        replica = Replica(pipeline, config.scheduler, plan, floors=setting.floors)
        if make_totals is not None and not config.simulation.record:
            replica.totals = make_totals(plan.limits.depth.most, config.slo)
        made.append(replica)
    return made


def make_pipelines(setting: Setting, *, repeat: int = 1, first: int = 0) -> list[SimulatedPipeline]:
    """Make the pipelines of a setting's replicas.

    Args:
        setting: shared by all replicas.
        repeat: see `make_replicas`.
        first: number of the first replica among all replicas of the run.
    """
    config, plan, control = setting.config, setting.plan, setting.control
    simulation, parallel = config.simulation, config.parallel
    links = stage_links(parallel.pp, parallel.tp, config.cluster, simulation.replicas)
    made = []
    for number, own_links in enumerate(links, first):
        seed = (config.seed + repeat - 1) * 1_000_003 + number
        make: Callable[..., SimulatedPipeline] = SimulatedPipeline
        if simulation.faults.are_any:
            faults = draw_faults(simulation.faults, parallel.world_size, seed=seed, replica=number)
            make = partial(FaultyPipeline, faults=faults, times=simulation.faults, parallel=parallel)
        made.append(
            make(
                setting.costs,
                depth=plan.limits.depth.most,
                num_blocks=plan.num_blocks,
                stage_links=own_links,
                scatter_gather=simulation.scatter_gather,
                overlap_sends=simulation.overlap_sends,
                dispatch_s=control.dispatch,
                result_s=control.result,
                turnaround_s=control.turnaround,
                disturbance=Disturbance(
                    simulation.jitter, simulation.straggler_rate, simulation.straggler_factor, seed
                ),
                draft_acceptance=simulation.draft_acceptance if config.scheduler.drafts else None,
                seed=seed,
            )
        )
    return made


Router = Callable[[Sequence[Replica], int], int]  # (replicas, request number) -> index of the replica


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
    workload: WorkloadConfig | None = None,
    start: float = 0.0,
    front: tuple[float, float] = (0.0, 0.0),
) -> Iterator[int]:
    """Run `items` to completion in order of arrival; yield the number of requests that have just ended.

    Args:
        replicas: idle replicas.
        items: see `Clients`.
        router: a name of `ROUTERS`.
        workload: gives the closed loop and the duration; see `Clients`.
        start: when the first item may be sent, in seconds on the replicas' clock.
        front: see `Clients`.

    Raises:
        PipelineError: the scheduler stalled: unfinished requests, and no micro-batch in flight.
    """
    with without_collector():
        yield from _run_fleet(replicas, Clients(items, workload, start, front), ROUTERS[router], start)


def _run_fleet(replicas: Sequence[Replica], clients: Clients, route: Router, now: float) -> Iterator[int]:
    sent = 0
    pending: set[int] = set()  # replicas that received requests at `now` and have not dispatched
    while (due := clients.due) < math.inf or not clients.are_done:
        if due > now:
            _dispatch(replicas, pending, now)
        if due == math.inf:
            first = min(range(len(replicas)), key=lambda i: replicas[i].next_event)
            if replicas[first].pipeline.is_empty and all(replica.pipeline.is_empty for replica in replicas):
                for replica in replicas:
                    replica.coordinator.check_progress()
            now = max(now, replicas[first].next_event)
            ended = replicas[first].collect()
            clients.answered(now, ended)
            pending.add(first)
            yield ended
            continue
        if due > now:
            for index, replica in enumerate(replicas):
                ended = replica.advance(due, clients)
                if replica.next_event == due:  # dispatch once, after the arrival is added
                    last = replica.collect()
                    clients.answered(due, last)
                    ended += last
                    pending.add(index)
                yield ended
            now = due
        chosen = route(replicas, sent)
        item = clients.take()
        replicas[chosen].add(sent, item, due - clients.to_engine(item))
        pending.add(chosen)
        sent += 1
    _dispatch(replicas, pending, now)
    for replica in replicas:
        while replica.unfinished:
            if replica.pipeline.is_empty:
                replica.coordinator.check_progress()
            yield replica.step()
        while not replica.pipeline.is_empty:
            replica.step()


def _dispatch(replicas: Sequence[Replica], pending: set[int], now: float) -> None:
    for index in pending:
        replicas[index].dispatch(now)
    pending.clear()
