"""A hint for runs with more threads than free CPU cores."""

from __future__ import annotations

import os
from functools import cache

from ..conf.schema import EngineConfig, ParallelConfig
from ..kernels import cores, processor
from ..runtime.core.numbers import counted

_BUSY = 0.75  # load average per core above which the machine counts as busy


def oversubscription(config: EngineConfig) -> str | None:
    """Return a one-line hint; None if cores suffice or the ranks may run elsewhere."""
    parallel = config.parallel
    if config.hardware.device != "cpu" or not are_here(parallel):
        return None
    return _hint(parallel.world_size, parallel.threads, cores.threads(), _load_before())


def are_here(parallel: ParallelConfig) -> bool:
    """Return whether all ranks run on this machine."""
    is_cluster = parallel.ray_address is not None or "RAY_ADDRESS" in os.environ
    return parallel.started_by in ("local", "process") or (parallel.started_by == "ray" and not is_cluster)


def threads(config: EngineConfig, replicas: int = 1) -> str | None:
    """Describe the threads and kernels of the ranks. None: on GPUs, or the ranks may run elsewhere."""
    parallel = config.parallel
    if config.hardware.device != "cpu" or not are_here(parallel):
        return None
    ranks = parallel.world_size * replicas
    number = parallel.threads or cores.threads(ranks)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if parallel.threads is None and replicas == 1 and parallel.started_by == "local" and limit.isdigit():
        number = min(number, int(limit))  # torch obeys it; Ray and torchrun set it to 1 for their processes
    level = processor.level()
    name = level.name if level else "no kernels for this processor"
    return f"{counted(number, 'thread')}{' each' * (ranks > 1)} ({cores.find()}, {name})"


def _hint(ranks: int, threads: int | None, cores: int, load: float) -> str | None:
    each = threads or max(1, cores // ranks)
    if ranks * each > cores:
        cure = f"parallel.threads={max(1, cores // ranks)}" if each > 1 else "fewer ranks"
        return f"{ranks * each} threads for {cores} cores; {cure} may be faster"
    if load > _BUSY * cores:
        cure = "; parallel.threads=1 may be faster" if each > 1 else ""
        return f"the machine is busy (load {load:.1f} on {cores} cores), so times will vary{cure}"
    return None


@cache
def _load_before() -> float:
    """Return the load average before the first run of this process, whose ranks increase it."""
    return os.getloadavg()[0]
