"""One run by hydra, composed once: for the checks before it starts, for its folder, and for the command.

`hydra.main` would compose it twice more: to find out that it is no sweep, and to run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic

from ..conf.errors import ConfigError
from .compose import E, hydra_loader, one_line, parse, to_config
from .output_path import check_folder

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class Job(Generic[E]):
    """A composed run."""

    config: E
    composed: DictConfig  # with hydra's own part
    loader: ConfigLoader

    def run(self, command: Callable[[Path], int | None]) -> int:
        """Make the run folder with hydra's files in it, call `command` with the folder, and return its exit code."""
        from hydra._internal.callbacks import Callbacks
        from hydra.core.hydra_config import HydraConfig
        from hydra.core.utils import configure_log, run_job
        from hydra.types import HydraContext

        failed: Exception | None = None
        code = 0

        def task(_: DictConfig) -> None:
            nonlocal failed, code
            try:
                code = command(Path(HydraConfig.get().runtime.output_dir)) or 0
            except Exception as error:  # hydra would print it in its own way
                failed = error
                raise

        composed = self.composed
        configure_log(composed.hydra.hydra_logging, composed.hydra.verbose)
        callbacks = Callbacks(composed)
        context = HydraContext(config_loader=self.loader, callbacks=callbacks)
        name = composed.hydra.job.config_name
        callbacks.on_run_start(config=composed, config_name=name)
        job = run_job(task, composed, "hydra.run.dir", None, context)
        callbacks.on_run_end(config=composed, config_name=name, job_return=job)
        if failed is not None:
            raise failed
        return code


def compose_job(overrides: Sequence[str], cls: type[E], command: str) -> Job[E]:
    """Compose the run of the rewritten `overrides`, and check that its folder can be written.

    Raises:
        ConfigError: what is wrong, in one line.
    """
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with hydra_loader(command) as loader:
        parse(overrides, loader, multirun=False)
        try:
            composed = loader.load_configuration(
                command, [*overrides, "hydra.mode=RUN"], RunMode.RUN, from_shell=False
            )  # fmt: skip
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(one_line(error)) from None
    try:
        folder = composed.hydra.run.dir
    except OmegaConfBaseException:
        pass  # it takes what only a running job has
    else:
        check_folder(Path(folder), "hydra.run.dir")
    own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    return Job(to_config(own, cls), composed, loader)
