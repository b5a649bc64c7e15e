"""Builds the cost model of a simulated cluster: chooses each stage's source of operator times."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from ....conf.architecture import LayerKind
from ....conf.errors import ConfigError
from ....conf.schema import HardwareConfig, SimulateConfig
from ....kernels.weight_format import WeightFormat
from ....models.memory import BYTES
from ....parallel.placement import stages_span_racks
from ...core.stage_floor import StageFloor, StageMachine
from ...engine.plan import Plan, stage_hardware
from ...engine.stage_floors import stage_floors
from ..cost.analytic import AnalyticOperators
from ..cost.error import CostError, widest
from ..cost.gemm import Gemm
from ..cost.measured import Measured, read_measured
from ..cost.mixed import MixedOperators
from ..cost.operators import HostTimes, Operators
from ..cost.stage_costs import StageCosts


def make_costs(config: SimulateConfig, plan: Plan) -> StageCosts:
    """Build the cost model of stage times per micro-batch.

    Raises:
        ConfigError: the hardware has neither a profile nor constants, or the profile is of another model.
    """
    parallel = config.parallel
    racks = stages_span_racks(parallel.pp, parallel.tp, config.cluster, config.simulation.replicas)
    sources: dict[tuple[object, ...], Operators] = {}
    operators = []
    for hardware, between_racks, layers in zip(stage_hardware(config), racks, plan.layers, strict=True):
        kinds = Counter(plan.kind(layer) for layer in layers)
        key = (hardware.name, between_racks, *sorted(kinds.items(), key=repr))
        if key not in sources:
            each = [make_operators(config, hardware, plan, between_racks, *kind) for kind in kinds]
            sources[key] = each[0] if len(each) == 1 else _mixed(tuple(each), tuple(kinds.values()))
        operators.append(sources[key])
    return _stage_costs(
        tuple(len(layers) for layers in plan.layers),
        tuple(operators),
        host=config.simulation.host,
        last_layer=config.simulation.last_layer,
    )


def make_operators(
    config: SimulateConfig,
    hardware: HardwareConfig,
    plan: Plan,
    between_racks: bool = False,
    kind: LayerKind | None = None,
    format: WeightFormat | None = None,
) -> Operators:
    """Make the operator times of one kind of device: measured if the profile is of that device, else analytic.

    `kind` is the kind of layer (None: the first layer's), `format` its weight format.

    Raises:
        ConfigError: as `make_costs`.
    """
    measured, simulation = _measured(config, plan), config.simulation
    if measured is not None and measured.hardware == hardware.name:
        return measured.operators
    if measured is not None and (simulation.devices is None or hardware.costs is None):
        raise ConfigError(
            f"simulation.profile={simulation.profile}: measured on hardware={measured.hardware}, not {hardware.name}"
        )
    costs = hardware.costs
    if costs is None:
        raise ConfigError(
            f"hardware={hardware.name}: has no cost constants; use hardware=a100-80g, or a profile by gapless profile "
            "(simulation.profile=FOLDER)"
        )
    if simulation.launch == "eager" and costs.eager_host is None:
        raise ConfigError(f"simulation.launch=eager: no eager launch times are known for hardware={hardware.name}")
    return _analytic(
        plan.arch,
        config.parallel.tp,
        costs,
        BYTES[plan.dtype],
        cluster=config.cluster,
        between_racks=between_racks,
        replicate_embedding=plan.replicate_embedding,
        attention=hardware.attention,
        launch=simulation.launch,
        expert_parallel=config.parallel.expert_parallel,
        expert_skew=simulation.expert_skew,
        kind=kind,
        cache_dtype=config.cache.dtype,
        layers=format,
        head=None if plan.formats is None else plan.formats.head,
    )


# Shared by later runs in the same process, with their cached times by number of rows.
_analytic = lru_cache(maxsize=16)(AnalyticOperators)
_mixed = lru_cache(maxsize=16)(MixedOperators)
_stage_costs = lru_cache(maxsize=16)(StageCosts)


def make_control(config: SimulateConfig, plan: Plan) -> HostTimes:
    """Make the host times between micro-batches, from the profile or the devices, plus the config's additions.

    Raises:
        ConfigError: as `make_costs`.
    """
    measured, simulation = _measured(config, plan), config.simulation
    if not simulation.host:
        hosts = [HostTimes()]
    elif measured is not None:
        hosts = [measured.operators.host]
    else:
        costs = [hardware.costs for hardware in stage_hardware(config)]
        hosts = [
            HostTimes() if each is None else HostTimes.of(each.host_of(simulation.launch), config.parallel.tp)
            for each in costs
        ]
    return HostTimes(
        front=hosts[0].front,
        dispatch=hosts[0].dispatch + simulation.dispatch_ms / 1e3,
        result=hosts[-1].result + simulation.result_ms / 1e3,
        turnaround=max(host.turnaround for host in hosts),
    )


def make_floors(config: SimulateConfig, plan: Plan) -> list[StageFloor]:
    """Make the work of each stage, with its device's constants as the machine; empty with a measured profile.

    Raises:
        ConfigError: as `make_costs`.
    """
    dtype_bytes, format = BYTES[plan.dtype], None if plan.formats is None else plan.formats.typical
    machines = []
    for hardware in stage_hardware(config):
        costs = hardware.costs
        if costs is None or _measured(config, plan) is not None:
            return []
        byte_tflops = costs.host_of(config.simulation.launch).byte_tflops
        gemm = Gemm(costs.gemm, costs.multiprocessors, dtype_bytes, format, byte_tflops=byte_tflops)
        machines.append(StageMachine({plan.dtype: gemm.tflops}, costs.gemm.memory_gigabytes_per_s))
    return stage_floors(
        *(plan.arch, plan.layers, machines),
        tp=config.parallel.tp,
        dtype_bytes=dtype_bytes,
        formats=plan.formats,
        cache_dtype=config.cache.dtype,
        last_layer=config.simulation.last_layer,
    )


def make_error(config: SimulateConfig, plan: Plan) -> CostError | None:
    """Return the error range of the times of `make_costs`; None: not known.

    Raises:
        ConfigError: as `make_costs`.
    """
    measured = _measured(config, plan)

    def error_of(hardware: HardwareConfig) -> CostError | None:
        if measured is not None and measured.hardware == hardware.name:
            return measured.error
        costs = hardware.costs
        return CostError.of(costs.error) if costs is not None and costs.error is not None else None

    return widest(error_of(hardware) for hardware in stage_hardware(config))


def _measured(config: SimulateConfig, plan: Plan) -> Measured | None:
    simulation, parallel = config.simulation, config.parallel
    if simulation.profile is None or simulation.cost == "analytic":
        return None
    return read_measured(
        simulation.profile,
        plan.arch,
        pp=parallel.pp,
        tp=parallel.tp,
        dtype=plan.dtype,
        quantization=config.model.quantization,
        cache_dtype=config.cache.dtype,
        devices_per_node=config.cluster.devices_per_node,
    )
