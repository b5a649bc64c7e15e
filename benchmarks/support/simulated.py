"""Runs simulations from overrides of `gapless simulate`."""

from __future__ import annotations

from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.simulation.pipeline.replicas import Replica
from gapless.runtime.simulation.pipeline.run import simulated
from gapless.runtime.simulation.pipeline.setting import make_setting
from gapless.runtime.simulation.workload import Workload

from .harness import words


def configure(*keys: str) -> SimulateConfig:
    """Compose a config; each of `keys` contains one or more overrides."""
    return compose_one(words(*keys), SimulateConfig, "simulate")


def replicas_of(config: SimulateConfig, workload: Workload | None = None) -> list[Replica]:
    """Simulate the requests of a config, or of `workload`."""
    setting = make_setting(config)
    if workload is None:
        workload = requests(config, {config.scheduler: setting.plan})[0]
    return simulated(setting, workload)


def fleet_of(config: SimulateConfig, workload: Workload | None = None) -> Fleet:
    num_prefill = config.simulation.disaggregation.prefill_replicas or 0
    return Fleet([replica.record for replica in replicas_of(config, workload)], num_prefill=num_prefill)
