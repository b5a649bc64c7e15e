"""What can be tried: grids that fill the devices, policies with their chunks, and what does not fit and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...conf.errors import ConfigError
from ...conf.policies import SchedulerConfig
from ...conf.schema import Architecture, SimulateConfig
from ...conf.tuning import TuneConfig
from ...models.huggingface import resolve_architecture
from ...parallel.split import split_layers
from ..cost.stage_costs import MicroBatchShape
from ..engine.plan import Plan
from .bounds import slowest_stage
from .demand import Demand, lengths
from .trial import Setting, make_setting

_CHUNK_KEYS = ("chunk", "budget")
_CLEARLY = 0.005  # of the slowest stage's time: a split that gains less is not tried


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the model. `chunk` is the policy's chunk or budget; None where it has none."""

    tp: int
    pp: int
    replicas: int
    policy: SchedulerConfig
    extra_depth: int | None = None  # beyond `pp`; None: the policy's own
    layers: tuple[int, ...] | None = None  # None: balanced
    batch: int | None = None  # B of a micro-batch; None: the slot bound

    @property
    def chunk(self) -> int | None:
        value = getattr(self.policy, chunk_key(self.policy) or "", None)
        return value if isinstance(value, int) else None

    @property
    def grid(self) -> str:
        replicas = f" x{self.replicas}" if self.replicas > 1 else ""
        return f"tp{self.tp} pp{self.pp}{replicas}"

    @property
    def label(self) -> str:
        """`tp4 pp2 x2 sarathi chunk=512 depth=3`: what differs from the defaults."""
        words = [self.grid, self.policy.name]
        if self.chunk is not None:
            words.append(f"{chunk_key(self.policy)}={self.chunk}")
        if self.extra_depth is not None:
            words.append(f"depth={self.pp + self.extra_depth}")
        if self.layers is not None:
            words.append(f"layers={','.join(map(str, self.layers))}")
        if self.batch is not None:
            words.append(f"batch={self.batch}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Grids that cannot hold the model, and the reason."""

    tp: int
    pp: int
    replicas: int
    why: str


@dataclass(slots=True)
class Space:
    """Settings of candidates, made once; what does not fit is kept with its reason."""

    config: TuneConfig
    misfits: list[Misfit] = field(default_factory=list)
    _settings: dict[Candidate, Setting] = field(default_factory=dict)

    def grids(self) -> list[tuple[int, int, int]]:
        """(tp, pp, replicas) that use all devices and split the model; what memory or shape forbids goes to
        `misfits`.

        Raises:
            ConfigError: none is left.
        """
        config = self.config
        arch = resolve_architecture(config.model)
        devices = config.nodes * config.hardware.devices_per_node
        found: list[tuple[int, int, int]] = []
        self.misfits.clear()
        for tp in config.search.tp or _divisors(config.hardware.devices_per_node):
            for pp in config.search.pp or _divisors(devices // tp):
                replicas, idle = divmod(devices, tp * pp)
                if idle or not replicas:
                    self._refuse(tp, pp, max(1, replicas), f"{tp * pp} ranks a replica do not divide {devices} devices")
                    continue
                if config.hardware.devices_per_node % tp:
                    self._refuse(tp, pp, replicas, f"tp={tp} does not divide the node's "
                                                   f"{config.hardware.devices_per_node} devices")  # fmt: skip
                    continue
                if config.search.pp is None and pp > arch.num_layers:
                    continue  # nobody asked for it
                try:
                    self.setting(Candidate(tp, pp, replicas, policies(config)[0]))
                except ConfigError as error:
                    self._refuse(tp, pp, replicas, str(error))
                    continue
                found.append((tp, pp, replicas))
        if not found:
            reasons = "; ".join(dict.fromkeys(misfit.why for misfit in self.misfits))
            raise ConfigError(f"nodes={config.nodes}: no tp x pp on {devices} devices holds the model: {reasons}")
        return found

    def candidates(self, demand: Demand) -> list[Candidate]:
        """Grids x policies x chunks, with the largest useful B; depth and split as they are by default."""
        found = []
        for tp, pp, replicas in self.grids():
            for policy in policies(self.config):
                for version in chunked(policy, self.config.search.chunk):
                    base = Candidate(tp, pp, replicas, version)
                    found.append(replace(base, batch=self.larger_batch(base, demand)))
        return found

    def variants(self, candidate: Candidate, demand: Demand, running: int | None = None) -> list[Candidate]:
        """The candidate's neighbours in depth, split and B, all of them together; the candidate first.

        Args:
            running: most requests that were seen to hold a slot at once; a B that gives more slots than that is not
                tried beside one that gives still more.
        """
        search = self.config.search
        own = self.config_of(candidate).scheduler.depth(candidate.pp)
        depths: list[int | None] = [None]
        if candidate.pp > 1:
            depths += [extra for extra in search.depth if candidate.pp + extra != own]
        found = []
        for depth in depths:
            for layers in (None, *self.splits(candidate, demand)):
                other = replace(candidate, extra_depth=depth, layers=layers, batch=None)
                batches = [self.larger_batch(other, demand)]
                slots = self.setting(other).plan.limits.running
                if batches != [None] and (running is None or running > slots):
                    batches.append(None)
                found += [replace(other, batch=batch) for batch in batches]
        found.sort(key=lambda c: c != candidate)
        return found

    def larger_batch(self, candidate: Candidate, demand: Demand) -> int | None:
        """B where requests are as long as they are on average, not as long as the context; None where that is no more.

        The slot bound of the paper (4.3.1) holds a context of KV for each; the paged cache needs what is there.
        """
        if not self.config.search.batch:
            return None
        setting = self.setting(replace(candidate, batch=None))
        plan, size = setting.plan, self.config.cache.block_size
        wide = self.setting(replace(candidate, batch=candidate.policy.max_batch)).plan
        mean = sum(lengths([demand]))
        batch = min(candidate.policy.max_batch, int(wide.num_blocks // -(-mean // size)) // plan.limits.depth)
        return batch if batch > plan.limits.batch else None

    def splits(self, candidate: Candidate, demand: Demand) -> list[tuple[int, ...]]:
        """Splits whose slowest stage takes clearly less for a typical micro-batch than the balanced split's: layers
        taken off the first stage, which embeds, or off the last, which samples."""
        if not self.config.search.layers or candidate.pp < 2:
            return []
        balanced = self.setting(replace(candidate, layers=None, batch=None))
        shapes = [typical_shape(balanced.plan, candidate, demand)]
        before = slowest_stage(balanced.costs, shapes)
        found = []
        for first, last in ((0, 1), (1, 0), (1, 1), (0, 2)):
            counts = _moved(balanced.plan.arch, candidate.pp, first, last)
            if counts is None:
                continue
            try:
                setting = self.setting(replace(candidate, layers=counts, batch=None))
            except ConfigError:  # no room on a stage that took a layer
                continue
            if slowest_stage(setting.costs, shapes) < (1 - _CLEARLY) * before:
                found.append(counts)
        return found

    def typical_seconds(self, candidate: Candidate, demand: Demand) -> float:
        """That a typical micro-batch is under way, until its decodes may go again."""
        setting = self.setting(candidate)
        shape = typical_shape(setting.plan, candidate, demand)
        return sum(setting.costs.seconds(shape)) * max(1.0, setting.plan.limits.depth / candidate.pp)

    def setting(self, candidate: Candidate) -> Setting:
        """Raises:
        ConfigError: it does not fit.
        """
        if candidate not in self._settings:
            self._settings[candidate] = make_setting(self.config_of(candidate))
        return self._settings[candidate]

    def config_of(self, candidate: Candidate) -> SimulateConfig:
        """What `gapless simulate` runs."""
        config = self.config
        depth = None if candidate.extra_depth is None else candidate.pp + candidate.extra_depth
        alone = candidate.tp * candidate.pp == 1
        launcher = "ray" if config.parallel.launcher == "local" and not alone else config.parallel.launcher
        return SimulateConfig(
            model=config.model,
            hardware=config.hardware,
            parallel=replace(config.parallel, tp=candidate.tp, pp=candidate.pp, layers=candidate.layers, depth=depth,
                             launcher=launcher),
            scheduler=replace(candidate.policy, batch=candidate.batch),
            cache=config.cache,
            seed=config.seed,
            workload=config.workload,
            simulation=replace(config.simulation, replicas=candidate.replicas),
        )  # fmt: skip

    def _refuse(self, tp: int, pp: int, replicas: int, why: str) -> None:
        self.misfits.append(Misfit(tp, pp, replicas, why))


def policies(config: TuneConfig) -> tuple[SchedulerConfig, ...]:
    """What is compared; at least one."""
    return config.policies or (config.scheduler,)


def chunk_key(policy: SchedulerConfig) -> str | None:
    """What a policy calls the tokens of its micro-batches; None where it has no such key."""
    return next((key for key in _CHUNK_KEYS if hasattr(policy, key)), None)


def chunked(policy: SchedulerConfig, chunks: Sequence[int]) -> list[SchedulerConfig]:
    """The policy with each chunk or budget; itself where it has neither."""
    key = chunk_key(policy)
    if key is None:
        return [policy]
    changes: list[dict[str, Any]] = [{key: chunk} for chunk in chunks]
    return [replace(policy, **change) for change in changes]


def typical_shape(plan: Plan, candidate: Candidate, demand: Demand) -> MicroBatchShape:
    """A micro-batch in the midst of a run: a chunk of half a prompt's prefix, and the decodes that come with it by the
    workload's P:D."""
    inputs, outputs = lengths([demand])
    chunk = candidate.chunk or round(inputs)
    decodes = max(1, min(plan.limits.batch, round(chunk * outputs / inputs)))
    length = max(1, min(chunk - decodes, plan.max_model_len))
    return MicroBatchShape(
        chunks=((length, max(0, round(inputs / 2))),),
        decodes=decodes,
        context=round(decodes * (inputs + outputs / 2)),
        sampled=decodes + 1,
    )


def _moved(arch: Architecture, pp: int, first: int, last: int) -> tuple[int, ...] | None:
    """The balanced split with so many layers fewer on the first and the last stage, dealt to those between them (of two
    stages to the other); None where a stage would be left without."""
    counts = [len(layers) for layers in split_layers(arch, pp, None)]
    counts[0] -= first
    counts[-1] -= last
    if min(counts) < 1 or (pp == 2 and first and last):
        return None
    between = range(1, pp - 1) if pp > 2 else ([1] if first else [0])
    for _ in range(first + last):
        counts[min(between, key=lambda stage: counts[stage])] += 1
    return tuple(counts)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
