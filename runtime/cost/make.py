"""The cost model of a simulated cluster: which source of operator times each stage has."""

from __future__ import annotations

from ...conf.build import load_hardware
from ...conf.errors import ConfigError
from ...conf.schema import Architecture, HardwareConfig, SimulateConfig
from ...models.memory import dtype_bytes
from ..plan import Plan
from .analytic import AnalyticOperators
from .operators import Operators
from .stage_costs import StageCosts


def stage_hardware(config: SimulateConfig) -> list[HardwareConfig]:
    """The hardware of each stage.

    Raises:
        ConfigError: `simulation.devices` names one that there is not.
    """
    devices = config.simulation.devices
    if devices is None:
        return [config.hardware] * config.parallel.pp
    return [load_hardware(name, "simulation.devices") for name in devices]


def make_costs(config: SimulateConfig, plan: Plan) -> StageCosts:
    """Seconds of each stage for a micro-batch.

    Raises:
        ConfigError: no profile or no constants of the hardware, or a profile of another model.
    """
    sources: dict[str, Operators] = {}
    for hardware in stage_hardware(config):
        if hardware.name not in sources:
            sources[hardware.name] = make_operators(config, hardware, plan.arch)
    operators = [sources[hardware.name] for hardware in stage_hardware(config)]
    return StageCosts([len(layers) for layers in plan.layers], operators, host=config.simulation.host)


def make_operators(config: SimulateConfig, hardware: HardwareConfig, arch: Architecture) -> Operators:
    """Operator times on one kind of device.

    Raises:
        ConfigError: as `make_costs`.
    """
    if hardware.costs is None:
        raise ConfigError(
            f"hardware={hardware.name}: no constants to simulate by; hardware=a100-80g has some"
        )
    return AnalyticOperators(arch, config.parallel.tp, hardware.costs, dtype_bytes(config.model, hardware.device))
