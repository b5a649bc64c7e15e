"""Divides this machine's threads and GPUs among replicas."""

from __future__ import annotations

import os
from dataclasses import replace

from ...conf.errors import ConfigError
from ...conf.schema import ServeConfig
from ...kernels import cores
from ..oversubscription import are_here

_DEVICES = "CUDA_VISIBLE_DEVICES"


def check_replicas(config: ServeConfig) -> None:
    """Check that the replicas can run on this machine together.

    Raises:
        ConfigError: torchrun starts the ranks of one pipeline only, or this machine has too few GPUs.
    """
    replicas, parallel = config.serve.replicas, config.parallel
    if replicas == 1:
        return
    if parallel.launcher == "torchrun":
        raise ConfigError(
            f"serve.replicas={replicas}: torchrun starts the ranks of one pipeline; must be 1, or use "
            "parallel.launcher=ray"
        )
    if config.hardware.device == "cuda" and are_here(parallel):
        needed, visible = replicas * parallel.world_size, len(_visible_devices())
        if visible < needed:
            raise ConfigError(
                f"serve.replicas={replicas}: {replicas} pipelines of {parallel.world_size} GPUs each need {needed}, "
                f"and this machine shows {visible}; must be {max(1, visible // parallel.world_size)} at most"
            )


def share_of(config: ServeConfig, replica: int) -> tuple[ServeConfig, dict[str, str]]:
    """Return the config of a replica, and its engine's environment variables.

    CPU ranks on this machine share its cores evenly, unless `parallel.threads` is given. GPU replicas get separate
    GPUs. On a Ray cluster, Ray places the replicas.
    """
    replicas, parallel = config.serve.replicas, config.parallel
    if replicas == 1 or not are_here(parallel):
        return config, {}
    ranks = parallel.world_size
    if config.hardware.device == "cuda":
        devices = _visible_devices()[replica * ranks : (replica + 1) * ranks]
        return config, {_DEVICES: ",".join(devices)}
    if parallel.threads is not None:
        return config, {}
    return replace(config, parallel=replace(parallel, threads=cores.threads(replicas * ranks))), {}


def _visible_devices() -> list[str]:
    listed = os.environ.get(_DEVICES)
    if listed is not None:
        return [device for device in listed.split(",") if device.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
