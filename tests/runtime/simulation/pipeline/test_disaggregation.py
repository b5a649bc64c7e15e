"""Prefill and decode pools: what must hold of any, and what links, caches and the ledger say of them. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.costs import LinkConfig
from gapless.conf.policies import POLICY_CONFIGS, SarathiConfig, SchedulerConfig, TokenBudgetConfig
from gapless.runtime.analysis.ledger.causes import Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.core.request import Request
from gapless.runtime.core.work_item import WorkItem
from gapless.runtime.engine.replay import exactly
from gapless.runtime.pipeline.protocol import PipelineError
from gapless.runtime.scheduler.policies import POLICIES
from gapless.runtime.scheduler.policies.sarathi import Sarathi
from gapless.runtime.simulation.cost.link import Link
from gapless.runtime.simulation.pipeline.disaggregation import DecodeReplica, DisaggregatedFleet, PrefillReplica
from gapless.runtime.simulation.pipeline.kv_transfer import KvLinks, KvTransfer
from gapless.runtime.simulation.pipeline.replicas import ROUTERS
from gapless.runtime.simulation.pipeline.simulated_pipeline import Disturbance
from tests.support.closed_loops import loop
from tests.support.simulated_parts import LONGEST, Audited, Device, items, make_replica, run
from tests.support.tiers import examples

ONE_BY_ONE = sorted(set(POLICIES) - {"request_level", "orca_worst"})
FREE = 1e300  # bytes a second


def link(bytes_per_s: float, flows: int = 1, least_s: float = 0.0) -> list[tuple[Link, float]]:
    link = Link(LinkConfig(least_us=1e6 * least_s, ramp_us=0.0, gigabytes_per_s=bytes_per_s / 1e9, knee=1.0))
    return [(link, flows)]


def pools(
    prefill: int = 1,
    decode: int = 1,
    policy: str | SchedulerConfig = "sarathi",
    *,
    budget: int = LONGEST,
    bytes_per_s: float = FREE,
    router: str = "round_robin",
    sources: Sequence[int] | None = None,
    targets: Sequence[int] | None = None,
    least_s: float = 0.0,
    prefill_how: dict[str, Any] | None = None,
    **how: Any,
) -> DisaggregatedFleet:
    """Two pools whose tokens have KV of one byte each."""
    before, after = (
        [
            {"disturbance": Disturbance(**how["disturbance"], seed=first + n)} if "disturbance" in how else {}
            for n in range(count)
        ]
        for first, count in ((0, prefill), (100, decode))
    )
    how.pop("disturbance", None)
    first = TokenBudgetConfig(max_batched_tokens=budget)
    return DisaggregatedFleet(
        [make_replica(first, kind=PrefillReplica, **(prefill_how or how) | own) for own in before],
        [make_replica(policy, kind=DecodeReplica, receives=True, **how | own) for own in after],
        KvLinks(link(bytes_per_s, least_s=least_s), {None: 1}, sources or range(prefill), targets or range(decode)),
        router,
    )


def ran(fleet: DisaggregatedFleet, work: Sequence[WorkItem], most: int | None = None) -> Fleet:
    assert sum(fleet.run(work, workload=loop(most))) == len(work)
    return fleet_of(fleet)


def fleet_of(fleet: DisaggregatedFleet) -> Fleet:
    num_prefill = sum(isinstance(replica, PrefillReplica) for replica in fleet.replicas)
    return Fleet([replica.record for replica in fleet.replicas], num_prefill=num_prefill)


@st.composite
def stages(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 3))
    return {
        "layers": draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)),
        "devices": [Device(draw(st.sampled_from([1.0, 3.0]))) for _ in range(count)],
        "batch": draw(st.integers(1, 5)),
        "depth": draw(st.none() | st.integers(1, 4)),
        "num_blocks": draw(st.integers(30, 70)),
        "dispatch_s": draw(st.sampled_from([0.0, 0.002])),
    }


@st.composite
def drawn(draw: st.DrawFn) -> dict[str, Any]:
    prefill, decode = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    requests = st.tuples(st.integers(1, 70), st.integers(1, 50), st.floats(0, 0.4))
    drafts = draw(st.sampled_from([0, 0, 2]))
    policy = POLICY_CONFIGS[draw(st.sampled_from(ONE_BY_ONE))](drafts=drafts)
    return {
        "requests": draw(st.lists(requests, min_size=1, max_size=14)),
        "most": draw(st.none() | st.integers(1, 6)),
        "pools": {
            "prefill": prefill,
            "decode": decode,
            "policy": policy,
            "budget": draw(st.integers(4, LONGEST)),
            "bytes_per_s": draw(st.sampled_from([FREE, 5000.0, 300.0])),
            "least_s": draw(st.sampled_from([0.0, 0.01])),
            "router": draw(st.sampled_from(sorted(ROUTERS))),
            "sources": draw(st.none() | st.just([0] * prefill)),
            "targets": draw(st.none() | st.just([0] * decode)),
            "prefill_how": draw(stages()),
            **draw(stages()),
            **({"draft_acceptance": 1.0} if drafts else {}),  # the audited ranks know no other
            **({"disturbance": {"jitter": 0.3}} if draw(st.booleans()) else {}),
        },
    }


@settings(max_examples=examples(80))
@given(drawn())
def test_every_request_ends_whole_and_its_kv_comes_between_its_halves(given_: dict[str, Any]) -> None:
    started = pools(**given_["pools"])
    work = items(*given_["requests"])
    fleet = ran(started, work, given_["most"])
    assert [request.record.request for request in fleet.joined] == list(range(len(work)))
    for request, item in zip(fleet.joined, work, strict=True):
        record = request.record
        assert (record.prompt_tokens, record.output_tokens) == (len(item.prompt), item.output_len)
        assert (record.finish_reason, record.finished) == ("length", record.token_times[-1])
        assert list(record.token_times) == sorted(record.token_times)
        assert (request.decode is None) == (item.output_len == 1) == (record.kv_transfer is None)
        assert request.prefill < fleet.num_prefill
        if record.kv_transfer is not None:
            assert request.decode is not None
            assert request.decode >= fleet.num_prefill
            begin, end = record.kv_transfer
            assert record.token_times[0] <= begin + 1e-9 <= end + 1e-9
            assert first_decodes(fleet, request.decode)[record.request] >= end - 1e-9
            ((way, _),) = link(given_["pools"]["bytes_per_s"], least_s=given_["pools"]["least_s"])
            assert end - begin == pytest.approx(way.seconds(len(item.prompt)), abs=1e-9)
    fleet.check()
    for replica in started.replicas:
        pipeline, scheduler = replica.pipeline, replica.coordinator.scheduler
        assert isinstance(pipeline, Audited)
        assert pipeline.most <= pipeline.depth
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
        assert all(m.kv_blocks_used <= pipeline.num_blocks for m in replica.record.micro_batches)
        assert all(m.num_running <= scheduler.limits.running for m in replica.record.micro_batches)
        assert not replica.unfinished
        assert not replica.queued_tokens
        assert not replica.coordinator.has_work
        if isinstance(replica, PrefillReplica):
            assert not any(len(m.decodes) for m in replica.record.micro_batches)
    check_ports(fleet, given_["pools"])


def first_decodes(fleet: Fleet, replica: int) -> dict[int, float]:
    """When the first decode of each request was dispatched, from the start of the fleet."""
    found: dict[int, float] = {}
    record, by = fleet.records[replica], fleet.starts[replica] - fleet.ledgers[replica].t0
    for micro_batch in record.micro_batches:
        for request in [*micro_batch.decodes.distinct, *(chunk.request for chunk in micro_batch.chunks)]:
            found.setdefault(request, micro_batch.dispatched + by)
    return found


def check_ports(fleet: Fleet, given_: dict[str, Any]) -> None:
    """Check that a port carries one transfer at a time."""
    moved = [request for request in fleet.joined if request.record.kv_transfer is not None]
    for own, ports in (("prefill", given_["sources"]), ("decode", given_["targets"])):
        for replica in range(len(fleet.records)):
            through = sorted(
                request.record.kv_transfer
                for request in moved
                if request.record.kv_transfer is not None and (ports is not None or getattr(request, own) == replica)
            )
            for (_, end), (begin, _) in pairwise(through):
                assert begin >= end - 1e-9


def told(fleet: Fleet) -> object:
    joined = fleet.joined
    return [(list(one.record.token_times), one.record.kv_transfer, one.prefill, one.decode) for one in joined]


@settings(max_examples=examples(10))
@given(drawn())
def test_the_same_seed_is_the_same_run(given_: dict[str, Any]) -> None:
    work = items(*given_["requests"])
    first, again = (ran(pools(**given_["pools"]), work, given_["most"]) for _ in range(2))
    assert told(first) == told(again)


@settings(max_examples=examples(40))
@given(st.integers(1, 70), st.integers(1, 50), st.floats(0, 0.3), stages())
def test_a_lone_request_over_a_free_link_is_as_on_one_replica(
    prompt: int, output: int, arrival: float, how: dict[str, Any]
) -> None:
    work = items((prompt, output, arrival))
    alone = make_replica(TokenBudgetConfig(max_batched_tokens=LONGEST), **how)
    run(alone, work)
    (joined,) = ran(pools(policy=TokenBudgetConfig(max_batched_tokens=LONGEST), **how), work).joined
    first = alone.record.requests[0].arrival
    assert joined.record.token_times == pytest.approx([time - first for time in alone.record.requests[0].token_times])
    (link_only,) = ran(pools(policy=TokenBudgetConfig(max_batched_tokens=LONGEST), least_s=0.25, **how), work).joined
    later = [0.0] + [0.25] * (output - 1)
    expected = [time + by for time, by in zip(joined.record.token_times, later, strict=True)]
    assert link_only.record.token_times == pytest.approx(expected)


def idle(fleet: Fleet, replica: int, cause: Cause) -> float:
    return fleet.ledgers[replica].seconds_by_cause()[cause]


def test_a_decode_replica_that_waits_for_kv_waits_for_transport() -> None:
    fleet = ran(pools(least_s=0.5, layers=(2,)), items((40, 5), (40, 5, 1.0), (40, 5, 2.0)))
    assert idle(fleet, 1, Cause.TRANSPORT) == pytest.approx(2 * 0.5)  # before the first micro-batch it is fill
    between = [each.record.arrival - before.record.token_times[-1] for before, each in pairwise(fleet.joined)]
    prefills = [each.record.token_times[0] - each.record.arrival for each in fleet.joined[1:]]
    assert idle(fleet, 1, Cause.STARVED_NO_REQUEST) == pytest.approx(sum(between) + sum(prefills))
    later = ran(pools(least_s=0.5, layers=(2, 2)), items((40, 5), (40, 5, 1.0), (40, 5, 2.0)))
    assert later.ledgers[1].seconds_by_cause(1)[Cause.TRANSPORT] > 2 * 0.49, "the delay comes down the pipeline"


def test_blocks_of_the_prefill_pool_stay_in_use_until_they_are_sent() -> None:
    work = items(*[(100, 4)] * 6)
    fast = ran(pools(layers=(2,), num_blocks=60), work)
    slow = ran(pools(layers=(2,), num_blocks=60, least_s=0.5), work)
    assert idle(fast, 0, Cause.STARVED_KV_FULL) == 0.0
    assert idle(slow, 0, Cause.STARVED_KV_FULL) > 4 * 0.5 * 0.9
    assert max(m.kv_blocks_used for m in slow.records[0].micro_batches) == 50


def test_kv_waits_for_room_in_the_decode_pool() -> None:
    work = items(*[(100, 10)] * 4)
    roomy, tight = (
        ran(pools(layers=(2,), num_blocks=blocks, prefill_how={"layers": (2,)}), work) for blocks in (400, 30)
    )
    assert [each.kv_wait for each in roomy.joined] == pytest.approx([0.0] * 4)
    for before, each in pairwise(tight.joined):
        assert each.record.kv_transfer is not None
        assert each.record.kv_transfer[0] == pytest.approx(before.record.token_times[-1])


def test_transfers_of_one_port_queue_and_others_pass_them() -> None:
    links = KvLinks(link(10.0), {None: 1}, [0, 1], [0, 1, 2])
    transfers = [
        KvTransfer(Request(n, bytes(10), exactly(2)), *path) for n, path in enumerate([(0, 0), (0, 1), (1, 0), (1, 2)])
    ]
    for transfer in transfers:
        links.add(transfer)
    links.begin(2.0)
    assert [transfer.begin for transfer in transfers] == [2.0, float("inf"), float("inf"), 2.0]
    assert links.next_event == 3.0
    assert links.end(2.9) == []
    assert links.end(3.0) == [transfers[0], transfers[3]]
    links.begin(3.5)
    assert [transfer.end for transfer in transfers] == [3.0, 4.5, 4.5, 3.0]


def test_of_layers_with_windows_only_what_they_reach_is_sent() -> None:
    links = KvLinks(link(10.0), {None: 3, 4: 5}, [0], [0])
    links.add(KvTransfer(Request(0, bytes(10), exactly(2)), 0, 0))
    links.begin(0.0)
    assert links.next_event == (10 * 3 + 4 * 5) / 10.0


def test_flows_share_the_bytes_and_the_slower_side_counts() -> None:
    slow, fast = (Link(LinkConfig(least_us=0.0, ramp_us=0.0, gigabytes_per_s=rate, knee=1.0)) for rate in (1.0, 10.0))
    for ways, seconds in (([(fast, 4), (slow, 4)], 2.0), ([(fast, 1)], 0.8)):
        links = KvLinks(ways, {None: 800_000_000}, [0], [0])
        links.add(KvTransfer(Request(0, bytes(10), exactly(2)), 0, 0))
        links.begin(0.0)
        assert links.next_event == pytest.approx(seconds)


def test_pools_are_routed_to_apart() -> None:
    fleet = ran(pools(2, 3), items(*[(5, 3)] * 12))
    assert [(each.prefill, each.decode) for each in fleet.joined] == [(n % 2, 2 + n % 3) for n in range(12)]
    names = [fleet.stage_name(stage) for stage in range(fleet.num_stages)]
    assert names == [
        f"{name}: stage {own}"
        for name in ("prefill 0", "prefill 1", "decode 2", "decode 3", "decode 4")
        for own in range(2)
    ]


def test_decodes_of_a_pool_are_never_held_up_by_a_prompt() -> None:
    work = items(*[(8, 40)] * 3, (100, 2, 0.05))
    mixed = make_replica(SarathiConfig(chunk=128), layers=(2,))
    run(mixed, work)
    apart = ran(pools(policy=SarathiConfig(chunk=128), layers=(2,)), work)
    assert longest_gap(mixed.record.requests[0].token_times) > 3 * longest_gap(apart.joined[0].record.token_times)


def longest_gap(times: Sequence[float]) -> float:
    return max(b - a for a, b in pairwise(times))


class TakesNothing(Sarathi):
    def admit_incoming(self) -> list[Request]:
        return []


def test_a_policy_that_takes_nothing_is_told() -> None:
    fleet = pools()
    scheduler = fleet.replicas[1].coordinator.scheduler
    fleet.replicas[1].coordinator.scheduler = TakesNothing(SarathiConfig(), scheduler.limits, scheduler.pool)
    with pytest.raises(PipelineError, match="scheduler stalled: 1 unfinished requests"):
        sum(fleet.run(items((5, 3))))
