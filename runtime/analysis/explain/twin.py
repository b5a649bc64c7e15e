"""The twin of a run: its setting and requests, from its run folder alone, and the error of its replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from ....conf.build import assign, build, fields, load_group, to_mapping
from ....conf.errors import ConfigError
from ....conf.policies import SchedulerConfig
from ....conf.schema import SimulateConfig
from ....conf.workloads import WorkloadConfig
from ...core.latencies import latencies, p99
from ...core.run_record import RunRecord
from ...core.work_item import WorkItem
from ...simulation.pipeline.replicas import Replica, make_replicas, run_fleet
from ...simulation.pipeline.setting import Setting, make_setting
from ..ledger.ledger import Ledger
from ..run_folder.read import RunFolder, with_infinities
from ..run_folder.titles import is_simulated
from .explanation import METRICS
from .learned_run import LearnedRun, learn_run
from .requests_of_record import requests_of

Values = dict[str, float]  # by metric of `METRICS`: seconds or milliseconds, or relative errors

_ERROR_SEEDS = range(5)


@dataclass
class Twin:
    """A run that can be replayed, unchanged or under other settings.

    Attributes:
        setting: the run's, with its stage costs and host times.
        items: the run's requests, with prompts of zeros; arrivals are seconds from the run's start.
        workload: the workload config, without a duration; used for closed loops.
        base: the run itself.
        ledger: the run's ledger.
        notes: simplifications and assumptions of the twin, one line each.
        learned: what its times were learned from; None: they are from the run's own cost model.
        is_real: whether the run was not simulated, so that a rerun with the same setting differs.
        is_whole: whether all requests of the run are replayed.
    """

    setting: Setting
    items: list[WorkItem]
    workload: WorkloadConfig
    base: RunRecord
    ledger: Ledger
    notes: list[str]
    learned: LearnedRun | None = None
    is_real: bool = False
    is_whole: bool = True

    def replay(self, seed: int | None = None, setting: Setting | None = None, *, in_order: bool = False) -> RunRecord:
        """Replay the run's requests and return the record.

        Args:
            seed: seed of the noise, which settings share as far as possible. None: no noise, except the disturbances of
                a simulated run, which are then the run's own.
            setting: None: the run's own.
            in_order: with learned times, the machine is slow when it was in the run.
        """
        setting = setting or self.setting
        if self.learned is None:
            [replica] = make_replicas(setting, repeat=1 if seed is None else 2 + seed)
        else:
            pipeline = self.learned.pipeline(setting, seed, in_order=in_order)
            replica = Replica(pipeline, setting.config.scheduler, setting.plan)
        front = setting.control.front if self.learned is None else (0.0, 0.0)  # real arrivals are at the engine
        for _ in run_fleet([replica], self.items, workload=self.workload, front=front):
            pass
        return replica.record

    def changed(self, overrides: Mapping[str, Any]) -> Setting:
        """Return the run's setting with some keys of its config changed.

        Args:
            overrides: plain values by dotted key. `scheduler` is the name of another policy, which keeps the keys
                common to all policies. A change of `parallel.pp` or `parallel.tp` resets layers, speeds and depth.

        Raises:
            ConfigError: an unknown key, an invalid value, or a setting that does not fit.
        """
        config = changed_config(self.setting.config, overrides)
        return make_setting(config) if self.learned is None else self.learned.setting(config)

    @cached_property
    def quiet(self) -> RunRecord:
        """The record of the unchanged run without noise: for a simulated run its own, else of a replay."""
        return self.base if self.is_whole and self.learned is None else self.replay()

    @cached_property
    def quiet_ledger(self) -> Ledger:
        """The ledger of `quiet`."""
        return self.ledger if self.quiet is self.base else Ledger(self.quiet)

    @property
    def is_noisy(self) -> bool:
        """Whether replays with different seeds differ: not for a simulated run without disturbances."""
        simulation = self.setting.config.simulation
        return self.learned is not None or simulation.jitter > 0 or simulation.straggler_rate > 0

    @cached_property
    def error(self) -> Values:
        """The error of the replay, by metric: replayed / real - 1; 0 if the run has no value to compare with.

        With learned times, the error is that of the median of a few replays: the machine is slow when it was in the
        run, and each micro-batch gets the noise of another one of similar time and size. The run's downtime and
        stalls are excluded from its duration, since replays do not have them.
        """
        real = values_of(self.base)
        if self.learned is not None:
            real["duration"] -= sum(fault.seconds or 0.0 for fault in self.base.faults) + self.learned.stalled
            replays = [values_of(self.replay(seed, in_order=True)) for seed in _ERROR_SEEDS]
        else:
            replays = [values_of(self.replay())]
        replayed = {metric: median(each[metric] for each in replays) for metric in METRICS}
        return {metric: replayed[metric] / value - 1 if value > 0 else 0.0 for metric, value in real.items()}


def make_twin(folder: RunFolder) -> Twin:
    """Make the twin of a run from its folder. See `twin_of`.

    Raises:
        ConfigError: the folder contains a fleet or no micro-batches, its config is unknown, or it is damaged.
    """
    if len(replicas := folder.replicas) > 1:
        raise ConfigError(
            f"{folder.path}: contains {len(replicas)} pipelines; give the folder of one, such as {replicas[0].path}"
        )
    try:
        record = folder.load()
        return twin_of(record, Ledger(record), folder.config)
    except ConfigError as error:
        where = f"{folder.path}: "
        raise error if str(error).startswith(str(folder.path)) else ConfigError(f"{where}{error}") from error


def twin_of(record: RunRecord, ledger: Ledger, recorded: Mapping[str, Any]) -> Twin:
    """Make the twin of a run. A simulated run uses its own cost model, if that can be rebuilt.

    Args:
        record: the run's record.
        ledger: the record's ledger.
        recorded: the run's config, from `summary.json`.

    Raises:
        ConfigError: there are no micro-batches or no tokens, or the config is unknown.
    """
    config = config_of(recorded)
    if not record.micro_batches or not any(span.end > span.begin for span in record.spans):
        raise ConfigError("no micro-batches to replay")
    if not any(request.token_times for request in record.requests):
        raise ConfigError("nothing to replay: no request got an output token")
    if config.simulation.disaggregation.is_on:
        raise ConfigError("a prefill or decode pool cannot be replayed alone")
    notes: list[str] = []
    if (number := config.simulation.replicas) > 1:
        config = replace(
            config,
            simulation=replace(config.simulation, replicas=1),
            workload=replace(config.workload, max_concurrency=None, think_ms=0.0),
        )
        notes.append(f"one of {number} replicas, with the requests and arrival times that its router gave it")
    if config.workload.warmup_requests:
        notes.append("warm-up requests are left out, so prefixes that they cached are recomputed")
    block_size, workload = config.block_size, replace(config.workload, duration_s=None)
    if is_simulated(recorded):
        try:
            setting = make_setting(config)
        except ConfigError as error:
            notes.append(f"stage times are learned from the run, since its cost model is unavailable: {error}")
        else:
            items, more = requests_of(record, config.workload, block_size)
            return Twin(setting, items, workload, record, ledger, notes + more)
    items, more = requests_of(record, config.workload, block_size, without_faults=True)
    if any(micro_batch.drafts for micro_batch in record.micro_batches):
        config = replace(config, simulation=replace(config.simulation, draft_acceptance=_acceptance(config, record)))
    learned, is_real = learn_run(config, record), not is_simulated(recorded)
    return Twin(learned.setting(config), items, workload, record, ledger, notes + more, learned, is_real)


def _acceptance(config: SimulateConfig, record: RunRecord) -> float:
    """Return the per-token acceptance probability of draft tokens that gives the run's share of accepted ones."""
    drafts = sum(micro_batch.drafts for micro_batch in record.micro_batches)
    share = sum(micro_batch.accepted for micro_batch in record.micro_batches) / drafts
    most, low, high = max(1, config.scheduler.drafts), 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**place for place in range(1, most + 1)) / most < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def config_of(recorded: Mapping[str, Any]) -> SimulateConfig:
    """Return a run's config from `summary.json` as a simulation config.

    Raises:
        ConfigError: it was not recorded, or is from another version.
    """
    found = with_infinities(recorded)
    if "model" not in found:
        raise ConfigError("cannot be replayed: its summary.json contains no config")
    mapping = {key: value for key, value in found.items() if key in fields(SimulateConfig)}
    mapping |= {"policies": (), "repeats": 1}
    try:
        return build(SimulateConfig, mapping)
    except ConfigError as error:
        raise ConfigError(f"its config is not valid in this version: {error}") from error


def changed_config(config: SimulateConfig, overrides: Mapping[str, Any]) -> SimulateConfig:
    """Return a config with `overrides`, as for `Twin.changed`."""
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


def values_of(record: RunRecord) -> Values:
    """Return the metrics of a run, computed as for `summary.json`."""
    requests = record.requests
    begin = record.start
    tokens = [request.token_times[-1] for request in requests if request.token_times]
    end = max([*tokens, *(span.end for span in record.spans)], default=begin)
    latency = latencies(requests)
    return {
        "duration": end - begin,
        "p99_itl_ms": p99(latency["itl"]),
        "p99_ttft_ms": p99(latency["ttft"]),
    }
