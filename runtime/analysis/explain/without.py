"""A run's twin without one cause: infinitely fast links, equal stages, unlimited clients, and so on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median
from typing import Any

from msgspec import structs

from ....conf.build import load_hardware
from ....conf.errors import ConfigError
from ...simulation.cost.operators import HostTimes, Operators
from ...simulation.cost.stage_costs import MicroBatchShape
from ..ledger.causes import UNEVEN_WORK, Cause
from ..ledger.compute_shares import compute_shares
from ..ledger.ledger import Ledger
from .arrivals import clients_of, overload_of
from .changes import Change, Shown, chunk_key, with_policy
from .even_split import even_split, mean_seconds, some_shapes
from .hops import slowest_hop
from .hot_experts import hot_experts
from .learned_operators import LearnedOperators
from .rated_costs import RatedCosts
from .roots import Root
from .slow_compute import find_slow_compute
from .twin import Twin

_LEAST_RATIO = 1.03  # of a stage's time to the others': smaller ratios count as even
_LIKELY = {Root.SMALL_CHUNK: 1.0, Root.LARGE_CHUNK: 1.0}  # least multiple of `Root.least` for a replay
_LATER = {Root.SMALL_CHUNK: 2.0, Root.LARGE_CHUNK: 2.0, Root.POLICY: 4.0}  # settings fix part of any other cause
_OF_MEMORY = 0.3  # likely cost if the record does not show it
_OF_CLIENTS = 0.08  # likely cost of a closed loop with many clients
_MANY = 4  # clients per stage that keep the stages busy
_LONG = 4  # prompts of at least this multiple of the median are long
_APART = 1.5  # least ratio of the shortest long prompt to the longest other one: else lengths just vary
_FEW = 0.2  # largest share of requests with long prompts
_LEAST_LONG = 0.05  # least share of all prompt tokens in long prompts
_PREEMPTED = 0.03  # least preemptions per request for the cause to be named preemption
_MORE_BLOCKS = 8  # multiple of a run's KV blocks that counts as unlimited
_MORE_REQUESTS = 4  # multiple of a micro-batch's requests that counts as unlimited
_REACHED = 0.5  # share of a machine's rates that good kernels reach
_CHUNKS = (4, 16, 2, 8, 32, 1 / 4, 1 / 16, 1 / 2, 1 / 8, 1 / 32)  # sizes to try, as multiples of the run's own
_MOST_LEARNED = 8  # largest multiple with learned times: beyond it they are guesses
_THINNED = 6  # ratio of the served rate to the rate to which arrivals are thinned
_LAST = 2  # requests that would end last, which are kept
_LEAST_CHUNK, _MOST_CHUNK = 16, 8192
# Policies that the run's own is compared with. The other policies bound compute by batches of whole prompts.
_POLICIES = ("equal_time", "sarathi", "token_budget")


@dataclass(frozen=True, slots=True)
class Without:
    """A variant of a run's twin without one cause.

    Attributes:
        cause: the cause that is removed.
        twin: builds the variant; raises `ConfigError` if it does not fit.
        change: the change of the run's setting that does so; None if no key does.
        stage: the stage, if the cause is a single stage.
        evidence: numbers that show the cause, by name.
        likely: estimated share of the run that the cause costs, which orders the replays.
        says: evidence in words, if numbers alone do not show it.
    """

    cause: Root
    twin: Callable[[], Twin]
    change: Change | None = None
    stage: int | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)
    likely: float = 0.0
    says: str = ""


def twins_without(twin: Twin, *, is_duration: bool = True) -> list[Without]:
    """Return variants of a run's twin, each without one cause that the run may have, likeliest first.

    Args:
        twin: the run's.
        is_duration: causes are sized by the run's duration, so skip those that can hardly affect it.
    """
    shown = Shown.of(twin.base, twin.ledger)
    physical = (_clients, _compute, _stages, _links, _noise, _arrivals, _control, _depth)
    of_sizes = (_prompts, _memory, _batch, _chunk)
    found = [*chain.from_iterable(make(twin) for make in physical), *_policy(twin)]
    found += chain.from_iterable(make(twin, shown) for make in of_sizes)
    if is_duration:
        found = [each for each in found if each.likely >= _LIKELY.get(each.cause, 0.5) * each.cause.least]
    return sorted(found, key=lambda each: -each.likely / _LATER.get(each.cause, 1.0))


def _by_change(
    twin: Twin, cause: Root, change: Change, likely: float, evidence: Mapping[str, float] | None = None
) -> Without:
    """Return the twin under a change of its setting that removes the cause."""

    def changed() -> Twin:
        return replace(twin, setting=twin.changed(change.values))

    return Without(cause, changed, change, None, evidence or {}, likely)


def _idle(twin: Twin, *causes: Cause) -> float:
    """Return the share of stage time that was idle for any of the ledger's `causes`."""
    seconds = twin.ledger.seconds_by_cause()
    return sum(seconds[cause] for cause in causes) / (twin.ledger.stage_seconds or 1.0)


def _contended(ledger: Ledger) -> list[float]:
    """Return the share of each stage's compute seconds spent waiting for a processor."""
    return [float(each) / (ledger.busy_seconds(stage) or 1.0) for stage, each in enumerate(ledger.contended)]


def _clients(twin: Twin) -> Iterator[Without]:
    """Yield the twin whose clients do not wait for answers."""
    bound, found = twin.workload.max_concurrency, clients_of(twin.base)
    if bound is not None and bound < len(twin.items):
        workload = replace(twin.workload, max_concurrency=None, think_ms=0.0)
        change = Change("clients", {"workload.max_concurrency": None})
        evidence = {"clients": float(bound), "think_s": twin.workload.think_ms / 1e3}
        few = 1 - min(1.0, bound / (_MANY * len(twin.setting.plan.layers)))
        likely = max(few, _idle(twin, Cause.STARVED_IN_FLIGHT, Cause.STARVED_NO_REQUEST), _OF_CLIENTS)
        yield Without(Root.FEW_REQUESTS, lambda: replace(twin, workload=workload), change, None, evidence, likely)
    elif found:
        first = min(item.arrival for item in twin.items)
        items = [structs.replace(item, arrival=first) for item in twin.items]
        yield Without(Root.FEW_REQUESTS, lambda: replace(twin, items=items, is_whole=False), None, None, found, 1.0)


def _memory(twin: Twin, shown: Shown) -> Iterator[Without]:
    """Yield the twin whose KV cache holds all requests."""
    preempted = sum(request.preemptions for request in twin.base.requests)
    is_set = twin.setting.config.cache.num_blocks is not None and shown.has_queue
    if not is_set and not shown.kv_full and not preempted and not _idle(twin, Cause.STARVED_KV_FULL):
        return
    cause = Root.PREEMPTION if preempted >= _PREEMPTED * len(twin.items) else Root.KV_FULL
    evidence = {"blocks": float(twin.setting.plan.num_blocks), "preemptions": float(preempted)}
    change = _more_memory(twin)
    if change is not None:
        yield _by_change(twin, cause, change, _OF_MEMORY, evidence)
        return
    setting = twin.setting
    plan = replace(setting.plan, num_blocks=_MORE_BLOCKS * setting.plan.num_blocks)
    slots = plan.num_blocks * plan.block_size // plan.max_model_len
    batch = max(plan.limits.batch, setting.config.scheduler.batch_of(slots, plan.limits.depth.most))
    plan = replace(plan, limits=replace(plan.limits, batch=batch))
    likely = _idle(twin, Cause.STARVED_KV_FULL) + cause.least
    yield Without(cause, lambda: replace(twin, setting=replace(setting, plan=plan)), None, None, evidence, likely)


def _more_memory(twin: Twin) -> Change | None:
    """Return the change that gives the KV cache all memory; None if it has it already."""
    config = twin.setting.config
    if config.cache.num_blocks is not None:
        return Change("memory", {"cache.num_blocks": None})
    own = usual = config.hardware.memory_gib
    with suppress(ConfigError):  # a custom device of the user
        usual = load_hardware(config.hardware.name, "hardware").memory_gib
    if config.hardware.device == "cpu":
        return Change("memory", {"hardware.memory_gib": 2 * own})
    return Change("memory", {"hardware.memory_gib": usual}) if own < usual else None


def _stages(twin: Twin) -> Iterator[Without]:
    """Yield the twins whose stages have the same number of layers, and the same devices."""
    setting = twin.setting
    counts = [len(layers) for layers in setting.plan.layers]
    if len(counts) < 2:
        return
    seconds = mean_seconds(setting.costs, some_shapes(twin.base.micro_batches))
    if twin.learned is not None:  # waiting for a processor is a separate cause
        seconds = [each * (1 - share) for each, share in zip(seconds, _contended(twin.ledger), strict=True)]
    slowest = seconds.index(max(seconds))
    others = [each for stage, each in enumerate(seconds) if stage != slowest]
    ratio = seconds[slowest] * len(others) / (sum(others) or 1.0)
    if ratio < _LEAST_RATIO:
        return
    likely = 1 - sum(seconds) / len(seconds) / seconds[slowest]
    evidence = {"ratio": ratio, "layers": counts[slowest], "of_layers": sum(counts), "stages": len(counts)}
    split = [sum(counts) // len(counts) + (stage < sum(counts) % len(counts)) for stage in range(len(counts))]
    if max(counts) - min(counts) > 1 and counts[slowest] > min(counts):
        change = Change("split", {"parallel.layers": split})
        own = _by_change(twin, Root.UNEVEN_LAYERS, change, likely, evidence)
        yield replace(own, stage=slowest)
    alike = _alike(twin, slowest, seconds)
    if alike is not None:
        routed = hot_experts(slowest, twin.base)
        yield Without(Root.SLOW_STAGE, alike, None, slowest, {**evidence, **routed}, likely)
    elif max(counts) - min(counts) <= 1 and slowest == len(counts) - 1:
        even = even_split(setting, twin.changed, twin.base.micro_batches)
        if even is not None:
            yield replace(_by_change(twin, Root.LM_HEAD, even, likely, evidence), stage=slowest)


def _alike(twin: Twin, slowest: int, seconds: Sequence[float]) -> Callable[[], Twin] | None:
    """Return a function that builds the twin with the others' device on the slowest stage; None if it has it."""
    setting, config = twin.setting, twin.setting.config
    operators: Sequence[Operators] = setting.costs.operators
    if twin.learned is None:
        devices = config.simulation.devices
        if devices is None or len(set(devices)) < 2:
            return None
        by_count = Counter(devices)
        fastest = devices[seconds.index(min(seconds))]
        usual = max(by_count, key=lambda name: (by_count[name], name == fastest))
        if usual == devices[slowest]:
            usual = fastest
        changed = {"simulation.devices": [usual] * len(devices)}
        return lambda: replace(twin, setting=twin.changed(changed))
    slower = [each.slower for each in operators if isinstance(each, LearnedOperators)]
    others = [each for stage, each in enumerate(slower) if stage != slowest]
    if len(slower) < 2 or slower[slowest] < _LEAST_RATIO * median(others):
        return None
    own = operators[slowest]
    assert isinstance(own, LearnedOperators)
    same = own.at_speed(median(others))
    costs = setting.costs.with_operators([*operators[:slowest], same, *operators[slowest + 1 :]])
    return lambda: replace(twin, setting=replace(setting, costs=costs))


class _FreeLink:
    """The operators of a stage with an infinitely fast link."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def send(self, rows: int, **_: Any) -> float:
        """Return 0."""
        return 0.0


def _compute(twin: Twin) -> Iterator[Without]:
    """Yield the twin whose slow stages compute at half of their machines' rates, as good kernels do."""
    floors, ledger = twin.base.floors, twin.ledger
    device = "device" if twin.setting.config.hardware.device == "cuda" else "processor"
    slow = find_slow_compute(compute_shares((twin.base, ledger)), floors, _contended(ledger), device)
    if not slow or len(floors) != len(twin.setting.plan.layers):
        return
    costs = RatedCosts(twin.setting.costs, floors, {each.stage for each in slow}, _REACHED)
    setting, first = replace(twin.setting, costs=costs), slow[0]
    evidence, stage = first.evidence, first.stage if len(slow) == 1 else None
    yield Without(
        Root.SLOW_COMPUTE, lambda: replace(twin, setting=setting), None, stage, evidence, 1.0, says=first.sentence
    )


def _links(twin: Twin) -> Iterator[Without]:
    """Yield the twin with infinitely fast links."""
    setting = twin.setting
    if len(setting.plan.layers) < 2:
        return
    free: dict[int, Any] = {id(each): _FreeLink(each) for each in setting.costs.operators}
    costs = setting.costs.with_operators([free[id(each)] for each in setting.costs.operators])
    likely = _idle(twin, Cause.TRANSPORT, Cause.STARVED_IN_FLIGHT)
    stage, evidence = slowest_hop(twin.ledger)
    free_links = replace(setting, costs=costs)
    yield Without(Root.TRANSPORT, lambda: replace(twin, setting=free_links), None, stage, evidence, likely)
    config = setting.config
    if config.parallel.tp > config.cluster.devices_per_node:
        changed = {"cluster.devices_per_node": config.parallel.tp}
        yield Without(Root.TENSOR_PARALLEL, lambda: replace(twin, setting=twin.changed(changed)), likely=1.0)


def _noise(twin: Twin) -> Iterator[Without]:
    """Yield the twin of a simulated run without jitter and stragglers."""
    simulation = twin.setting.config.simulation
    if twin.learned is None and (simulation.jitter or simulation.straggler_rate):
        changed = {"simulation.jitter": 0.0, "simulation.straggler_rate": 0.0}
        likely = simulation.jitter + simulation.straggler_rate * (simulation.straggler_factor - 1)
        likely *= len(twin.setting.plan.layers)
        yield Without(Root.CHANCE, lambda: replace(twin, setting=twin.changed(changed)), likely=likely)


def _batch(twin: Twin, shown: Shown) -> Iterator[Without]:
    """Yield the twin with a larger limit of requests per micro-batch."""
    policy, most = twin.setting.config.scheduler, twin.setting.plan.limits.batch
    if shown.has_queue and shown.most_requests >= most:
        key = "scheduler.max_batch" if policy.batch is None else "scheduler.batch"
        change = Change("admission", {key: _MORE_REQUESTS * most})
        yield _by_change(twin, Root.SMALL_BATCH, change, _OF_MEMORY, {"batch": float(most)})


def _arrivals(twin: Twin) -> Iterator[Without]:
    """Yield the twin with arrivals thinned out until no queue grows.

    It keeps the last arrival and the requests that would end last without a queue.
    """
    late, evidence = overload_of(twin.base, twin.ledger)
    if late <= 0 or twin.workload.max_concurrency is not None or clients_of(twin.base):
        return
    usual = sorted(len(item.prompt) for item in twin.items)[len(twin.items) // 2]
    a_token = sum(twin.setting.costs.seconds(MicroBatchShape((), 1, usual, 1)))
    by_end = sorted(twin.items, key=lambda item: item.arrival + a_token * item.output_len)
    step = math.ceil(_THINNED * evidence["arrived_per_s"] / evidence["served_per_s"])
    kept = {id(item) for item in (*twin.items[::step], twin.items[-1], *by_end[-_LAST:])}
    items = [item for item in twin.items if id(item) in kept]
    likely = late / twin.ledger.span_seconds
    yield Without(Root.OVERLOAD, lambda: replace(twin, items=items, is_whole=False), None, None, evidence, likely)


def _prompts(twin: Twin, shown: Shown) -> Iterator[Without]:
    """Yield the twin whose few long prompts, each of several micro-batches, are cut to the median length."""
    lengths = sorted(len(item.prompt) for item in twin.items)
    usual = round(median(lengths))
    least = max(_LONG * usual, 2 * shown.chunk)
    long = [length for length in lengths if length >= least]
    if not long or len(long) > _FEW * len(lengths) or sum(long) < _LEAST_LONG * sum(lengths):
        return
    if long[0] < _APART * lengths[-len(long) - 1]:
        return
    items = [
        item if len(item.prompt) < least else structs.replace(item, prompt=bytes(usual), prefix=None)
        for item in twin.items
    ]
    evidence = {"prompts": len(long), "tokens": median(long), "usual": usual}
    likely = sum(long) / sum(lengths)
    yield Without(Root.LONG_PROMPTS, lambda: replace(twin, items=items, is_whole=False), None, None, evidence, likely)


def _control(twin: Twin) -> Iterator[Without]:
    """Yield the twin with an infinitely fast coordinator."""
    setting = replace(twin.setting, control=HostTimes())
    yield Without(Root.CONTROL, lambda: replace(twin, setting=setting), likely=_idle(twin, Cause.CONTROL))


def _depth(twin: Twin) -> Iterator[Without]:
    """Yield the twin with one micro-batch in flight per stage."""
    stages = len(twin.setting.plan.layers)
    if twin.setting.plan.limits.depth.most < stages:
        evidence = {"depth": float(twin.setting.plan.limits.depth.most)}
        yield _by_change(twin, Root.DEPTH, Change("depth", {"parallel.depth": stages}), _OF_MEMORY, evidence)


def _chunk(twin: Twin, shown: Shown) -> Iterator[Without]:
    """Yield the twins with other chunk sizes."""
    policy = twin.setting.config.scheduler
    key = chunk_key(policy)
    if key is None:
        return
    value = getattr(policy, key)
    own = shown.chunk if value == "auto" else int(value)
    larger = _larger_chunks(twin, min(own, shown.chunk))
    smaller = _idle(twin, *UNEVEN_WORK[:2], Cause.STAGE_IMBALANCE, Cause.STARVED_IN_FLIGHT)
    tile, sizes = twin.setting.config.hardware.tile, {own}
    for factor in _CHUNKS:
        size = _whole_tiles(round(own * factor), tile)
        is_guess = twin.learned is not None and factor > _MOST_LEARNED
        if _LEAST_CHUNK <= size <= _MOST_CHUNK and size not in sizes and not is_guess:
            sizes.add(size)
            cause, likely = (Root.SMALL_CHUNK, larger) if factor > 1 else (Root.LARGE_CHUNK, smaller)
            change = Change("chunk", {f"scheduler.{key}": size})
            yield _by_change(twin, cause, change, likely, {"tokens": float(own)})


def _whole_tiles(size: int, tile: int) -> int:
    """Return a size rounded to whole tiles, to which GEMMs are padded; unchanged below half a tile."""
    return max(1, round(size / tile)) * tile if 2 * size >= tile else size


def _larger_chunks(twin: Twin, tokens: int) -> float:
    """Return the share of compute that chunks of four times `tokens` prompt tokens would save."""
    costs, batches = twin.setting.costs, twin.base.micro_batches
    if not tokens or not batches:
        return 0.0
    decodes = round(sum(each.decode_tokens for each in batches) / len(batches))
    small, large = (max(costs.seconds(MicroBatchShape(((n, 0),), decodes))) for n in (tokens, 4 * tokens))
    with_prompts = sum(bool(each.chunks) for each in batches) / len(batches)
    return max(0.0, with_prompts * (1 - large / (4 * small)))


def _policy(twin: Twin) -> Iterator[Without]:
    """Yield the twins under other policies."""
    policy = twin.setting.config.scheduler
    likely = _idle(twin, *UNEVEN_WORK, Cause.STARVED_IN_FLIGHT)
    if policy.name not in _POLICIES:  # it may also cost compute, not just idle time
        likely = max(likely, Root.POLICY.least)
    for name in _POLICIES:
        if name != policy.name:
            yield _by_change(twin, Root.POLICY, with_policy(policy, name), likely)
