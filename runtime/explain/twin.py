"""The twin of a run: its setting and its requests, from its run folder alone, and how far its replay is off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...conf.build import assign, build, fields, load_group, to_mapping
from ...conf.errors import ConfigError
from ...conf.policies import SchedulerConfig
from ...conf.schema import SimulateConfig
from ..core.micro_batch_columns import Floats
from ..core.run_record import RunRecord
from ..ledger.latencies import latencies
from ..ledger.ledger import Ledger
from ..run_folder.read import RunFolder
from ..simulation.replicas import make_replicas, run_fleet
from ..simulation.setting import Setting, make_setting
from ..workload import WorkItem
from .requests_of_record import requests_of


@dataclass(frozen=True, slots=True)
class TwinError:
    """Relative errors of a replay against the run: replayed / real - 1; 0 where the run has nothing to compare."""

    makespan: float
    busy: tuple[float, ...]  # seconds of compute by stage
    bubble: float  # share of stage time that is idle between the first and the last micro-batch
    p99_tbt: float
    p99_ttft: float


class Twin:
    """A run that can be replayed, and replayed otherwise.

    Attributes:
        setting: the run's, with its stage costs and the host's times.
        items: its requests, with prompts of zeros; arrivals are seconds from the run's start.
        max_concurrency: most unfinished requests of its closed loop; None: none.
        base: the run itself.
        notes: what the twin leaves out or assumes, a line each.
    """

    def __init__(
        self, setting: Setting, items: list[WorkItem], max_concurrency: int | None, base: RunRecord,
        notes: list[str],
    ) -> None:  # fmt: skip
        self.setting = setting
        self.items = items
        self.max_concurrency = max_concurrency
        self.base = base
        self.notes = notes

    def replay(self, seed: int | None = None, setting: Setting | None = None) -> RunRecord:
        """Replay the run's requests and return the record.

        Args:
            seed: draws noise; the same seed draws the same for every setting as far as settings can share it. None: no
                noise. The disturbances of a simulated run are then its own.
            setting: None: the run's own.
        """
        setting = setting or self.setting
        replicas = make_replicas(setting, repeat=1 if seed is None else 2 + seed)
        for _ in run_fleet(replicas, self.items, max_concurrency=self.max_concurrency):
            pass
        return replicas[0].record

    def changed(self, overrides: Mapping[str, Any]) -> Setting:
        """Return the run's setting with some keys of its config changed.

        Args:
            overrides: plain values by dotted key. `scheduler` is the name of another policy, which keeps the keys that
                all policies have. A change of `parallel.pp` or `parallel.tp` resets layers, speeds and depth.

        Raises:
            ConfigError: an unknown key, a wrong value, or what does not fit.
        """
        return make_setting(changed_config(self.setting.config, overrides))

    @cached_property
    def error(self) -> TwinError:
        """How far the replay is off."""
        return error_of(self.replay(), self.base)


def make_twin(folder: RunFolder) -> Twin:
    """Make the twin of a run.

    Raises:
        ConfigError: the folder holds a fleet or no micro-batches, its config is unknown, or it is damaged.
    """
    if len(replicas := folder.replicas) > 1:
        raise ConfigError(f"{folder.path}: {len(replicas)} pipelines; give the run of one, as {replicas[0].path}")
    record = folder.load()
    if not any(span.end > span.begin for span in record.spans) or not record.micro_batches:
        raise ConfigError(f"{folder.path}: no micro-batches to replay")
    config = config_of(folder)
    setting = make_setting(config)
    found = requests_of(record, config.workload, config.cache.block_size)
    return Twin(setting, found.items, config.workload.max_concurrency, record, found.notes)


def config_of(folder: RunFolder) -> SimulateConfig:
    """Return a run's config as that of a simulation.

    Raises:
        ConfigError: it was not recorded, or is of another version.
    """
    found = folder.composed
    if "model" not in found:
        raise ConfigError(f"{folder.path}: its summary.json holds no config, so that the run cannot be replayed")
    mapping = {key: value for key, value in found.items() if key in fields(SimulateConfig)}
    mapping |= {"policies": (), "repeats": 1, "experiment": None}
    try:
        return build(SimulateConfig, mapping)
    except ConfigError as error:
        raise ConfigError(f"{folder.path}: its config does not hold here: {error}") from error


def changed_config(config: SimulateConfig, overrides: Mapping[str, Any]) -> SimulateConfig:
    """Return a config with `overrides`, as of `Twin.changed`."""
    mapping = to_mapping(config)
    if (policy := overrides.get("scheduler")) is not None:
        common = {name: mapping["scheduler"][name] for name in fields(SchedulerConfig) if name != "name"}
        mapping["scheduler"] = load_group("scheduler", policy) | common
    grid = (config.parallel.pp, config.parallel.tp)
    if (overrides.get("parallel.pp", grid[0]), overrides.get("parallel.tp", grid[1])) != grid:
        mapping["parallel"] |= {"layers": None, "stage_speeds": None, "depth": None}
    for key, value in overrides.items():
        if key != "scheduler":
            assign(mapping, key, value, SimulateConfig)
    return build(SimulateConfig, mapping)


def error_of(replayed: RunRecord, real: RunRecord) -> TwinError:
    """Compare a replay with the run."""
    ours, its = Ledger(replayed), Ledger(real)
    latency, its_latency = latencies(replayed.requests), latencies(real.requests)

    def p99(name: str) -> float:
        return _relative(_p99(latency[name]), _p99(its_latency[name]))

    return TwinError(
        makespan=_relative(ours.span_seconds, its.span_seconds),
        busy=tuple(_relative(ours.busy_seconds(s), its.busy_seconds(s)) for s in range(its.num_stages)),
        bubble=_relative(ours.bubble_fraction_inner, its.bubble_fraction_inner),
        p99_tbt=p99("itl"),
        p99_ttft=p99("ttft"),
    )


def _p99(values: Floats) -> float:
    return float(np.percentile(values, 99)) if len(values) else 0.0


def _relative(ours: float, its: float) -> float:
    return ours / its - 1 if its > 0 else 0.0
