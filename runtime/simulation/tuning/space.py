"""The candidates of a search: grids of ranks, policies with their chunks, and the grids that do not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....conf.errors import ConfigError
from ....conf.policies import SchedulerConfig
from ....conf.schema import SimulateConfig, recast
from ....conf.tuning import TuneConfig
from ....models.block_groups import blocks_held
from ....models.checkpoint import Checkpoint
from ...engine.plan import Plan
from ..cost.stage_costs import MicroBatchShape
from ..pipeline.setting import Setting, make_setting
from .bounds import slowest_stage
from .demand import Demand, lengths

_CHUNK_KEYS = ("chunk", "max_batched_tokens")  # policy keys of the tokens per micro-batch
_MIN_GAIN = 0.005  # share of the slowest stage's time that a layer split must save to be tried


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the model, to be tried by a search.

    Attributes:
        tp: Tensor-parallel ranks per stage.
        pp: Stages.
        replicas: Replicas of the whole pipeline.
        policy: The scheduler.
        extra_depth: Micro-batches in flight beyond `pp`; None: the policy's own depth.
        layers: Layers of each stage; None: the balanced split.
        batch: B, the maximum number of decodes in a micro-batch; None: the slot bound.
        expert_parallel: Ranks hold whole experts.
    """

    tp: int
    pp: int
    replicas: int
    policy: SchedulerConfig
    extra_depth: int | None = None
    layers: tuple[int, ...] | None = None
    batch: int | None = None
    expert_parallel: bool = False

    @property
    def chunk(self) -> int | None:
        """The policy's chunk or budget, in tokens; None if it has none."""
        value = getattr(self.policy, chunk_key(self.policy) or "", None)
        return value if isinstance(value, int) else None

    @property
    def simplicity(self) -> tuple[int, int, int]:
        """Sort key by how simple a candidate is to run, least for the simplest.

        It counts departures from the policy's own depth, split and B, then ranks of a replica, then stages.
        """
        departures = sum(value is not None for value in (self.extra_depth, self.layers, self.batch))
        return departures, self.tp * self.pp, self.pp

    @property
    def grid(self) -> str:
        """The ranks as text: `tp4 pp2 x2`, or `tp4 ep pp2 x2` with expert parallelism."""
        replicas = f" x{self.replicas}" if self.replicas > 1 else ""
        return f"tp{self.tp}{' ep' if self.expert_parallel else ''} pp{self.pp}{replicas}"

    @property
    def label(self) -> str:
        """The candidate as text, without defaults: `tp4 pp2 x2 sarathi chunk=512 depth=3`."""
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
    """A grid that cannot hold the model, and the reason."""

    tp: int
    pp: int
    replicas: int
    why: str


@dataclass(slots=True)
class Space:
    """The candidates that a config allows, and their settings, each made once.

    Attributes:
        config: The search's config.
        misfits: Grids that do not fit; `grids` fills it.
    """

    config: TuneConfig
    misfits: list[Misfit] = field(default_factory=list)
    _settings: dict[Candidate, Setting] = field(default_factory=dict)

    def grids(self) -> list[tuple[int, int, int]]:
        """Return the (tp, pp, replicas) that use all devices and can hold the model. The others go to `misfits`.

        Raises:
            ConfigError: No grid can hold the model.
        """
        config = self.config
        arch = Checkpoint.open(config.model, tensors=False).arch
        of_node = config.cluster.devices_per_node
        devices = config.nodes * of_node
        found: list[tuple[int, int, int]] = []
        self.misfits.clear()
        for tp in config.search.tp or _divisors(of_node):
            for pp in config.search.pp or _divisors(devices // tp):
                replicas, idle = divmod(devices, tp * pp)
                if idle or not replicas:
                    self._refuse(
                        tp, pp, max(1, replicas), f"{tp * pp} ranks per replica do not divide {devices} devices"
                    )
                    continue
                if config.search.replicas is not None and replicas not in config.search.replicas:
                    continue
                if of_node % tp:
                    self._refuse(tp, pp, replicas, f"tp={tp} does not divide the node's {of_node} devices")
                    continue
                if config.search.pp is None and pp > arch.num_layers:
                    continue  # more stages than layers, and the config does not ask for them
                try:
                    self.setting(self.first(tp, pp, replicas))
                except ConfigError as error:
                    self._refuse(tp, pp, replicas, str(error))
                    continue
                found.append((tp, pp, replicas))
        if not found:
            reasons = "; ".join(dict.fromkeys(misfit.why for misfit in self.misfits))
            raise ConfigError(f"nodes={config.nodes}: no tp x pp on {devices} devices holds the model: {reasons}")
        return found

    def candidates(self, demand: Demand) -> list[Candidate]:
        """Return all grids x policies x chunks, with the B that fills the KV cache, and the default depth and split."""
        found = []
        for tp, pp, replicas in self.grids():
            for policy in policies(self.config):
                for version in chunked(policy, self.config.search.chunk):
                    for whole in self._expert_parallel(tp):
                        base = Candidate(tp, pp, replicas, version, expert_parallel=whole)
                        found.append(replace(base, batch=self.fitting_batch(base, demand)))
        return found

    def first(self, tp: int, pp: int, replicas: int) -> Candidate:
        """Return the first candidate of a grid; all candidates of the grid have the same KV cache."""
        return Candidate(tp, pp, replicas, policies(self.config)[0], expert_parallel=self._expert_parallel(tp)[0])

    def _expert_parallel(self, tp: int) -> Sequence[bool]:
        """Return the options to try on `tp` ranks: tensor-parallel experts, expert parallelism, or both."""
        experts = Checkpoint.open(self.config.model, tensors=False).arch.experts
        if experts is None or tp == 1:
            return [False]
        tried = self.config.search.expert_parallel
        return [whole for whole in tried if not whole or experts.num_experts % tp == 0] or tried[:1]

    def variants(self, candidate: Candidate, demand: Demand, running: int | None = None) -> list[Candidate]:
        """Return the candidate and its neighbours: all combinations of other depths, layer splits and B.

        Args:
            candidate: The candidate; it comes first.
            demand: The workload.
            running: Maximum number of requests that ran at once in a trial of the candidate. If its B allowed more,
                a larger B is not tried.
        """
        search = self.config.search
        own = self.config_of(candidate).scheduler.depth(candidate.pp).most
        depths: list[int | None] = [None]
        if candidate.pp > 1 and self.config.parallel.depth is None:
            depths += [extra for extra in search.depth if candidate.pp + extra != own]
        found = []
        for depth in depths:
            for layers in (None, *self.splits(candidate, demand)):
                other = replace(candidate, extra_depth=depth, layers=layers, batch=None)
                batches = [self.fitting_batch(other, demand)]
                most = self.setting(replace(other, batch=batches[0])).plan.limits.running
                if batches != [None] and (running is None or running >= most):
                    batches.append(None)
                found += [replace(other, batch=batch) for batch in batches]
        found.sort(key=lambda c: c != candidate)
        return found

    def fitting_batch(self, candidate: Candidate, demand: Demand) -> int | None:
        """Return the B at which requests of mean length, in all micro-batches, fill the KV cache.

        No micro-batch then takes more than its share of the decodes. None if that B is not smaller than the policy's
        own, or if B is not searched.
        """
        if not self.config.search.batch:
            return None
        plan = self.setting(replace(candidate, batch=None)).plan
        blocks = blocks_held(math.ceil(sum(lengths([demand]))), plan.windows, plan.block_size)
        batch = max(1, int(plan.num_blocks // blocks) // plan.limits.depth.most)
        return batch if batch < plan.limits.batch else None

    def splits(self, candidate: Candidate, demand: Demand) -> list[tuple[int, ...]]:
        """Return the layer splits whose slowest stage is faster than the balanced split's.

        They take one or two layers off the first stage, which embeds, or off the last, which samples. Stages are
        compared on a typical micro-batch.
        """
        if not self.config.search.layers or candidate.pp < 2:
            return []
        balanced = self.setting(replace(candidate, layers=None, batch=None))
        shapes = [typical_shape(balanced.plan, candidate, demand)]
        balanced_s = slowest_stage(balanced.costs, shapes)
        found = []
        for first, last in ((0, 1), (1, 0), (1, 1), (0, 2)):
            counts = _shifted_split([len(layers) for layers in balanced.plan.layers], first, last)
            if counts is None:
                continue
            try:
                setting = self.setting(replace(candidate, layers=counts, batch=None))
            except ConfigError:  # a stage that takes a layer has no memory for it
                continue
            if slowest_stage(setting.costs, shapes) < (1 - _MIN_GAIN) * balanced_s:
                found.append(counts)
        return found

    def typical_seconds(self, candidate: Candidate, demand: Demand) -> float:
        """Return the seconds from the dispatch of a typical micro-batch until its decodes can be dispatched again."""
        setting = self.setting(candidate)
        shape = typical_shape(setting.plan, candidate, demand)
        return sum(setting.costs.seconds(shape)) * max(1.0, setting.plan.limits.depth.most / candidate.pp)

    def setting(self, candidate: Candidate) -> Setting:
        """Return the setting of a candidate: its plan and its stage times.

        Raises:
            ConfigError: The candidate does not fit.
        """
        if candidate not in self._settings:
            self._settings[candidate] = make_setting(self.config_of(candidate))
        return self._settings[candidate]

    def config_of(self, candidate: Candidate) -> SimulateConfig:
        """Return the config with which `gapless simulate` runs a candidate."""
        config = self.config
        fixed = config.parallel.depth
        depth = fixed if candidate.extra_depth is None else candidate.pp + candidate.extra_depth
        parallel = replace(
            config.parallel,
            tp=candidate.tp,
            pp=candidate.pp,
            layers=config.parallel.layers if candidate.layers is None else candidate.layers,
            depth=depth,
            launcher=None,
            expert_parallel=candidate.expert_parallel,
        )
        return recast(
            config,
            SimulateConfig,
            parallel=parallel,
            scheduler=replace(candidate.policy, batch=candidate.batch),
            policies=(),
            simulation=replace(config.simulation, replicas=candidate.replicas),
        )

    def _refuse(self, tp: int, pp: int, replicas: int, why: str) -> None:
        self.misfits.append(Misfit(tp, pp, replicas, why))


def policies(config: TuneConfig) -> tuple[SchedulerConfig, ...]:
    """Return the policies that are compared, at least one."""
    return config.policies or (config.scheduler,)


def chunk_key(policy: SchedulerConfig) -> str | None:
    """Return the key that sets the tokens of a policy's micro-batches, `chunk` or `budget`; None if it has neither."""
    return next((key for key in _CHUNK_KEYS if hasattr(policy, key)), None)


def chunked(policy: SchedulerConfig, chunks: Sequence[int]) -> list[SchedulerConfig]:
    """Return the policy with each chunk or budget; the policy itself if it has neither."""
    key = chunk_key(policy)
    if key is None:
        return [policy]
    changes: list[dict[str, Any]] = [{key: chunk} for chunk in chunks]
    return [replace(policy, **change) for change in changes]


def typical_shape(plan: Plan, candidate: Candidate, demand: Demand) -> MicroBatchShape:
    """Return the shape of a typical micro-batch: a chunk in the middle of a prompt, and piggybacked decodes.

    There are as many decodes per chunk as the workload's P:D ratio implies, up to the limit of the plan.
    """
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


def _shifted_split(counts: list[int], first: int, last: int) -> tuple[int, ...] | None:
    """Move layers of the balanced split off the outer stages, to the stages with the fewest layers between them.

    Args:
        counts: Layers of each stage of that split. Of two stages, one gives layers to the other.
        first: Layers that the first stage gives away.
        last: Layers that the last stage gives away.

    Returns:
        Layers of each stage; None if a stage would have none.
    """
    pp = len(counts)
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
