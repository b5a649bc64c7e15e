"""Titles of runs: model and policy; for simulated runs also the hardware and the parallel grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def is_simulated(config: Mapping[str, Any]) -> bool:
    """Return whether a run's config describes a simulation."""
    return isinstance(config.get("simulation"), Mapping)


def title_of(config: Mapping[str, Any]) -> str:
    """Return a run's title.

    Examples: `Simulated: sarathi, llama2-70b on 8 x a100-80g, tp 8, pp 1`, or `gapless: shipped, sarathi`.
    """
    policy, model = _name(config, "scheduler"), _name(config, "model")
    if is_simulated(config):
        return f"Simulated: {', '.join(filter(None, (policy, setting_of(config))))}"
    names = ", ".join(filter(None, (model, policy)))
    return f"gapless: {names}" if names else "gapless"


def comparison_title(configs: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> str:
    """Return the title of a comparison.

    It contains the runs' labels and, if some are simulated, a remark and the model and grid that all share.
    """
    joined = ", ".join(labels)
    what = joined if len(joined) <= 60 else f"{len(labels)} settings"
    simulated = [is_simulated(config) for config in configs]
    if not any(simulated):
        return f"gapless: {what}"
    settings = {setting_of(config) for config in configs}
    shared = settings.pop() if len(settings) == 1 else _shared(configs)
    return f"{'Simulated' if all(simulated) else 'Simulated and measured'}: {', '.join(filter(None, (what, shared)))}"


def setting_of(config: Mapping[str, Any]) -> str:
    """Return the model, the devices and the grid, per pool if there are pools.

    Example: `llama2-70b on 4 x a100-80g + 4 x h100, tp 4, pp 2`.
    """
    model, hardware = _name(config, "model"), _name(config, "hardware")
    parallel, simulation = config.get("parallel"), config.get("simulation")
    if not isinstance(parallel, Mapping):
        return model
    tp, pp = int(parallel.get("tp", 1)), int(parallel.get("pp", 1))
    replicas = int(simulation.get("replicas", 1)) if isinstance(simulation, Mapping) else 1
    pool = simulation.get("disaggregation") if isinstance(simulation, Mapping) else None
    if isinstance(pool, Mapping) and pool.get("prefill_replicas"):
        prefill, first = int(pool["prefill_replicas"]), pool.get("prefill_hardware") or hardware
        prefill_tp, prefill_pp = int(pool.get("prefill_tp") or tp), int(pool.get("prefill_pp") or pp)
        devices = Counter({first: prefill * prefill_tp * prefill_pp})
        devices[hardware] += replicas * tp * pp
        what = " + ".join(f"{count} x {name}" for name, count in devices.items())
        pools = f"{prefill} prefill of tp {prefill_tp}, pp {prefill_pp}, {replicas} decode of tp {tp}, pp {pp}"
        return f"{model} on {what}, {pools}"
    own = simulation.get("devices") if isinstance(simulation, Mapping) else None
    stages = Counter(own or [hardware] * pp)
    devices_text = " on " + " + ".join(f"{count * tp * replicas} x {name}" for name, count in stages.items() if name)
    devices_text = devices_text if own or hardware else ""
    grid = f"tp {tp}, pp {pp}" + (f", {replicas} replicas" if replicas > 1 else "")
    return f"{model}{devices_text}, {grid}"


def _shared(configs: Sequence[Mapping[str, Any]]) -> str:
    """Return the model and the hardware, each if all runs share it."""
    models, hardware = ({_name(config, group) for config in configs} for group in ("model", "hardware"))
    model = models.pop() if len(models) == 1 else ""
    return f"{model} on {hardware.pop()}".strip() if len(hardware) == 1 and hardware != {""} else model


def _name(config: Mapping[str, Any], group: str) -> str:
    """Return the name that a group of the config has; empty if it has none."""
    section = config.get(group)
    return str(section.get("name", "")) if isinstance(section, Mapping) else ""
