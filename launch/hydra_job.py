"""Runs a function in the run folder of a composed point, in this process or with a hydra launcher.

Hydra creates the folder and calls the function. `run_job` and `HydraContext` are its plug-in interface.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..conf.errors import ConfigError
from ..conf.schema import EngineConfig
from .compose import ComposedRun
from .plugins import blame

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext
    from omegaconf import DictConfig

Task = Callable[["DictConfig", Path], int]
"""Takes the composed config and the run folder, and returns an exit code."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run_here(point: ComposedRun[EngineConfig], task: Task, number: int | None = None) -> int:
    """Run one point and return its exit code. Exceptions of the task are propagated.

    Args:
        point: the composed run.
        task: the function to run.
        number: index of the point in its sweep; None without a sweep.
    """
    from hydra.core.utils import run_job
    from omegaconf import OmegaConf

    folder, subfolder = "hydra.run.dir", None
    if number is not None:
        folder, subfolder = "hydra.sweep.dir", "hydra.sweep.subdir"
        point.composed.hydra.job.update(id=str(number), num=number)
    try:
        return _code(run_job(_returning(task), point.composed, folder, subfolder, _context(point)))
    except OSError as error:  # errors of `write` name no file
        if error.errno in _FULL and error.filename is None:
            raise OSError(error.errno, error.strerror, str(OmegaConf.select(point.composed, folder))) from error
        raise


def run_by_launcher(points: Sequence[ComposedRun[EngineConfig]], task: Task) -> list[int]:
    """Run the points of a sweep with their hydra launcher, and return their exit codes."""
    from hydra.core.plugins import Plugins

    def blaming(composed: DictConfig, folder: Path) -> int:
        try:
            return task(composed, folder)
        except Exception as error:
            if line := blame(error):  # here, as the traceback is lost between processes
                raise ConfigError(line) from error
            raise

    launcher = Plugins.instance().instantiate_launcher(_context(points[0]), _returning(blaming), points[0].composed)
    # The launcher adds hydra's own overrides.
    own = [[text for text in point.overrides if not text.startswith(("hydra/", "++hydra."))] for point in points]
    jobs = launcher.launch(own, 0)
    return [_code(job) for job in jobs]


def _context(point: ComposedRun[EngineConfig]) -> HydraContext:
    from hydra.experimental.callback import Callback
    from hydra.types import HydraContext

    return HydraContext(point.loader, Callback())  # type: ignore[arg-type]


def _returning(task: Task) -> Callable[[DictConfig], Any]:
    """Wrap a task to return its exception, which hydra would print in its own format."""

    def returning(composed: DictConfig) -> Any:
        from hydra.core.hydra_config import HydraConfig

        try:
            return task(composed, Path(HydraConfig.get().runtime.output_dir))
        except Exception as error:
            return error

    return returning


def _code(job: JobReturn) -> int:
    if isinstance(job.return_value, Exception):
        raise job.return_value
    code: int = job.return_value
    return code
