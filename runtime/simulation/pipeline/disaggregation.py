"""Disaggregated prefill: a pool of prefill replicas, a pool of decode replicas, and the KV transfers between them."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ....conf.policies import SchedulerConfig
from ....conf.workloads import WorkloadConfig
from ...core.garbage_collection import without_collector
from ...core.messages import TokenLogprobs
from ...core.request import Request
from ...core.stage_floor import StageFloor
from ...core.work_item import WorkItem
from ...engine.clients import Clients
from ...engine.plan import Plan
from ...engine.replay import exactly
from ...pipeline.protocol import PipelineError
from .kv_transfer import KvLinks, KvTransfer, make_links
from .replicas import ROUTERS, Replica, make_pipelines
from .setting import Setting
from .simulated_pipeline import SimulatedPipeline


class PrefillReplica(Replica):
    """A replica that prefills each request and samples its first token.

    The KV blocks of a request that needs more tokens stay in use until `release`.
    """

    def __init__(
        self, pipeline: SimulatedPipeline, policy: SchedulerConfig, plan: Plan, floors: list[StageFloor] | None = None
    ) -> None:
        super().__init__(pipeline, policy, plan, stop_check=self._keep_blocks, floors=floors)
        self.prefilled: list[Request] = []  # need more tokens, not handed over yet
        self._more: dict[int, WorkItem] = {}  # original items of requests that need more than one token
        self._kept: dict[int, list[int]] = {}  # KV blocks by request

    def add(self, number: int, item: WorkItem, arrival: float) -> None:
        """Submit an item for its first token; if it needs more tokens, keep its blocks until its KV is sent."""
        if item.output_len > 1 and len(item.prompt) + 1 < self.max_model_len:
            self._more[number] = item
        super().add(number, msgspec.structs.replace(item, output_len=1), arrival)

    def _keep_blocks(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take over the blocks of a request that has its first token, before the scheduler frees them."""
        if request.id in self._more:
            self._kept[request.id] = self.coordinator.scheduler.pool.take_back(request)
            self.prefilled.append(request)

    def take_prefilled(self) -> list[tuple[Request, WorkItem]]:
        """Return and clear the requests that can be handed over, each with its original item."""
        taken, self.prefilled = self.prefilled, []
        return [(request, self._more.pop(request.id)) for request in taken]

    def release(self, number: int) -> None:
        """Free the blocks of a request whose KV has been sent."""
        self.coordinator.scheduler.pool.release(self._kept.pop(number))


class DecodeReplica(Replica):
    """A decode replica: it generates every token of a request but the first."""

    def receive(self, prefilled: Request, item: WorkItem, now: float) -> None:
        """Queue a request whose first token came at `now`."""
        request = Request(
            prefilled.id,
            item.prompt,
            exactly(item.output_len),
            arrival=now,
            max_model_len=self.max_model_len,
            user=item.user,
            priority=item.priority,
            output=prefilled.output,
        )
        request.prefill_target = request.num_dispatched = request.prompt_len
        self.coordinator.add(request)
        self.unfinished += 1
        self.queued_tokens += request.max_len

    def admit(self) -> list[Request]:
        """Admit the requests that have room; their KV can be sent."""
        return self.coordinator.scheduler.admit_incoming()

    def received(self, request: Request, begin: float, end: float) -> None:
        """Mark a request as ready to decode; its KV was sent in [begin, end)."""
        request.record.kv_transfer = (begin, end)
        self.coordinator.scheduler.received(request)


class DisaggregatedFleet:
    """A prefill pool and a decode pool on one clock.

    The router picks a prefill replica for each request and, after its first token, a decode replica. Once the decode
    replica has reserved blocks, the KV is sent. Then the request decodes, and its blocks on the prefill replica are
    freed.

    Events of both pools and of the links are processed in time order, since each may wait for the others. Work that
    becomes admissible is dispatched after all events of the same time.
    """

    def __init__(
        self,
        prefill: Sequence[PrefillReplica],
        decode: Sequence[DecodeReplica],
        links: KvLinks,
        router: str = "round_robin",
    ) -> None:
        self._prefill = list(prefill)
        self._decode = list(decode)
        self.replicas: list[Replica] = [*prefill, *decode]
        self._links = links
        self._route = ROUTERS[router]
        self._now = 0.0
        self._sources: dict[int, int] = {}  # prefill replica of each request that waits for room in the decode pool
        self._to_prefill: set[int] = set()  # prefill replicas that have not dispatched since something changed
        self._to_decode: set[int] = set()

    def run(
        self,
        items: Iterable[WorkItem],
        workload: WorkloadConfig | None = None,
        start: float = 0.0,
        front: tuple[float, float] = (0.0, 0.0),
    ) -> Iterator[int]:
        """Like `run_fleet`, over both pools.

        Raises:
            PipelineError: the scheduler stalled: unfinished requests, and no micro-batch in flight.
        """
        with without_collector():
            yield from self._run(Clients(items, workload, start, front))

    def _run(self, clients: Clients) -> Iterator[int]:
        sent = unfinished = 0
        while (due := clients.due) < math.inf or unfinished:
            if due > self._now:
                self._dispatch()
                if due == math.inf or self._next_event < due:
                    ended = self._collect()
                    clients.answered(self._now, ended)
                    unfinished -= ended
                    yield ended
                    continue
                self._now = due
            chosen = self._route(self._prefill, sent)
            item = clients.take()
            self._prefill[chosen].add(sent, item, due - clients.to_engine(item))
            self._to_prefill.add(chosen)
            sent += 1
            unfinished += 1
        for replica in self.replicas:
            while not replica.pipeline.is_empty:
                replica.step()

    @property
    def _next_event(self) -> float:
        return min(self._links.next_event, min([replica.next_event for replica in self.replicas]))

    def _dispatch(self) -> None:
        """Dispatch the work that is admissible now, and start transfers."""
        now = self._now
        for index in sorted(self._to_prefill):
            self._prefill[index].dispatch(now)
        for index in sorted(self._to_decode):
            for request in self._decode[index].admit():
                self._links.add(KvTransfer(request, self._sources.pop(request.id), index))
            self._decode[index].dispatch(now)
        self._to_prefill.clear()
        self._to_decode.clear()
        self._links.begin(now)

    def _collect(self) -> int:
        """Process all events at the time of the next one; return the number of requests that ended."""
        now = self._next_event
        if now == math.inf:
            for replica in self.replicas:
                replica.coordinator.check_progress()
            raise PipelineError("requests were lost between the pools")
        self._now = now = max(now, self._now)
        ended = 0
        for index, decode in enumerate(self._decode):
            if decode.next_event <= now:
                ended += decode.collect()
                self._to_decode.add(index)
        for transfer in self._links.end(now):
            self._prefill[transfer.source].release(transfer.request.id)
            self._decode[transfer.target].received(transfer.request, transfer.begin, transfer.end)
            self._to_prefill.add(transfer.source)
            self._to_decode.add(transfer.target)
        for index, prefill in enumerate(self._prefill):
            if prefill.next_event <= now:
                ended += prefill.collect()
                self._to_prefill.add(index)
                for request, item in prefill.take_prefilled():
                    ended -= 1
                    self._sources[request.id] = index
                    chosen = self._route(self._decode, request.id)
                    self._decode[chosen].receive(request, item, now)
                    self._to_decode.add(chosen)
        return ended


def make_disaggregated(setting: Setting, *, repeat: int = 1) -> DisaggregatedFleet:
    """Make the idle fleet of a setting with a prefill pool.

    Args:
        setting: the decode pool's, with the prefill pool's in `prefill`.
        repeat: see `make_replicas`.
    """
    pool = setting.prefill
    assert pool is not None
    first = pool.config.simulation.replicas
    return DisaggregatedFleet(
        [
            PrefillReplica(made, pool.config.scheduler, pool.plan, floors=pool.floors)
            for made in make_pipelines(pool, repeat=repeat)
        ],
        [
            DecodeReplica(made, setting.config.scheduler, setting.plan, floors=setting.floors)
            for made in make_pipelines(setting, repeat=repeat, first=first)
        ],
        make_links(pool, setting),
        setting.config.simulation.router,
    )
