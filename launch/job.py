"""Runs a composed command line after validation: a single run, or the points of a sweep in turn."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from ..conf.build import leaves, to_mapping
from ..conf.errors import ConfigError
from ..conf.schema import ChatConfig, EngineConfig, GenerateConfig, ModelConfig
from ..conf.units import doubtful
from .commands import Command
from .compose import ComposedRun, compose_all, to_config
from .hydra_job import run_by_launcher, run_here
from .open_files import allow_files
from .output_path import check_folder
from .prompts import StandardInput
from .stderr_log import PROGRAM, messages_on_stderr
from .unused_gpu import unused_gpu

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ..runtime.pipeline.launcher import Launcher

_log = logging.getLogger(__name__)


def run(command: Command, overrides: Sequence[str], *, multirun: bool) -> int:
    """Run the command once, or at each point of a sweep, and return its exit code.

    Raises:
        ConfigError: the command line is invalid; nothing has been started.
    """
    from ..runtime.core.garbage_collection import without_collector

    cls = command.config
    assert issubclass(cls, EngineConfig)
    if command.has_ranks:
        allow_files()
    else:  # BLAS threads would only spin
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    stdin = StandardInput()
    module = import_module(f".{command.name}", __package__)
    _sampling_defaults.cache_clear()
    with without_collector():
        points = compose_all(overrides, cls, command.name, multirun=multirun)
        points = [replace(point, config=_with_defaults(point.config, point.overrides)) for point in points]
        configs = [point.config for point in points]
        _log_oddities(configs, has_ranks=command.has_ranks)
        sweep_folder = _check_folder(points, "sweep" if multirun else "run")
        prepared = {config: module.prepare(config, stdin) for config in dict.fromkeys(configs)}
    brief = {"brief": True} if multirun and command.compares else {}

    def run_config(config: EngineConfig, folder: Path, launcher: Launcher | None = None) -> int:
        # Not prepared in a separate process, or for a repeated config.
        own = prepared.pop(config) if config in prepared else module.prepare(config, stdin)
        return module.run(config, own, folder, launcher, **brief) or 0

    if not multirun:
        return run_here(points[0], lambda _, folder: run_config(configs[0], folder))
    outputs = [config.outputs for config in configs if isinstance(config, GenerateConfig) and config.outputs]
    if len(set(outputs)) < len(outputs):
        raise ConfigError(f"outputs={outputs[0]}: all runs of the sweep would write to it; remove outputs")
    if sweep_folder is not None:
        _write_sweep(Path(sweep_folder), points[0], overrides)
    if _have_launcher(points):
        prepared.clear()
    code = _run_sweep(points, run_config, has_ranks=command.has_ranks)
    if sweep_folder is not None and len(set(configs)) > 1:
        if command.compares:
            from . import report

            report.compare_sweep(sweep_folder)
        else:
            _log.info("compare these runs with: %s report %s", PROGRAM, sweep_folder)
    return code


def _with_defaults(config: EngineConfig, overrides: Sequence[str]) -> EngineConfig:
    """Return the config with the checkpoint's sampling defaults, except those set on the command line.

    Raises:
        ConfigError: as `sampling_defaults`.
    """
    if not isinstance(config, GenerateConfig | ChatConfig) or not (found := _sampling_defaults(config.model)):
        return config
    given = [text.lstrip("+") for text in overrides]
    own = {name for name in found for text in given if re.match(rf"sampling(\.|=.*\b){name}[=:]", text, re.DOTALL)}
    sampling = replace(config.sampling, **{name: found[name] for name in found.keys() - own})
    return replace(config, sampling=sampling, model=replace(config.model, generation_config=None))


@cache  # logged once per sweep
def _sampling_defaults(model: ModelConfig) -> Mapping[str, Any]:
    from ..models.generation_config import sampling_defaults

    return sampling_defaults(model)


def _log_oddities(configs: Sequence[EngineConfig], *, has_ranks: bool) -> None:
    """Warn about implausible values, and log if a GPU is unused."""
    for line in dict.fromkeys(line for config in configs for line in doubtful(leaves(to_mapping(config)))):
        _log.warning(line)
    if has_ranks and (unused := next(filter(None, map(unused_gpu, configs)), None)):
        _log.info(unused)


def _run_sweep(points: Sequence[ComposedRun[EngineConfig]], run_config: Callable[..., int], *, has_ranks: bool) -> int:
    """Run all points, duplicate configs once, and return the highest exit code."""
    first: dict[EngineConfig, int] = {}
    same_as = [first.setdefault(point.config, number) for number, point in enumerate(points)]
    skipped = {
        number: f"run {number} equals run {same_as[number]} without {', '.join(point.dropped)}: skipped"
        for number, point in enumerate(points)
        if point.dropped and same_as[number] != number
    }
    cls = type(points[0].config)

    def run_point(composed: DictConfig, folder: Path, launcher: Launcher | None = None) -> int:
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        with messages_on_stderr():
            _log.info("run %s: %s", hydra.job.num, " ".join(text.lstrip("+") for text in hydra.overrides.task))
            if hydra.job.num not in skipped:
                return run_config(_with_defaults(to_config(composed, cls), hydra.overrides.task), folder, launcher)
            _log.info(skipped[hydra.job.num])
            shutil.rmtree(folder)
            return 0

    if _have_launcher(points):
        return max(run_by_launcher(points, run_point))
    with _kept_launcher([point.config for point in points] if has_ranks else ()) as launcher:
        run_kept = partial(run_point, launcher=launcher)
        return max(run_here(point, run_kept, number) for number, point in enumerate(points))


def _have_launcher(points: Sequence[ComposedRun[EngineConfig]]) -> bool:
    """Return whether a hydra launcher runs them in separate processes."""
    return any(text.startswith("hydra/launcher=") for text in points[0].overrides)


def _check_folder(points: Sequence[ComposedRun[EngineConfig]], kind: str) -> str | None:
    """Check that the folder of a run or a sweep is writable; return it, or None if only a running job can resolve it.

    The time in its name is that of the first point.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    composed = points[0].composed
    try:
        folder = str(composed.hydra[kind].dir)
    except OmegaConfBaseException:
        return None
    check_folder(Path(folder), f"hydra.{kind}.dir")
    for point in points[1:]:
        OmegaConf.copy_cache(composed, point.composed)
    return folder


def _write_sweep(folder: Path, first: ComposedRun[EngineConfig], overrides: Sequence[str]) -> None:
    """Write the file that marks a sweep folder: the config of the first point, and the sweep's overrides."""
    from omegaconf import OmegaConf

    from ..runtime.core.whole_file import write_text
    from .report import SWEEP

    whole = cast(dict[str, Any], OmegaConf.to_container(first.composed, enum_to_str=True))
    whole["hydra"]["overrides"]["task"] = list(overrides)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / SWEEP, yaml.safe_dump(whole, sort_keys=False, allow_unicode=True))


@contextmanager
def _kept_launcher(configs: Sequence[EngineConfig]) -> Iterator[Launcher | None]:
    """Provide a launcher that keeps Ray and its actors between the runs of a sweep, if all have the same ranks."""
    grids = [config.parallel for config in configs]
    ranks = {(grid.pp, grid.tp, grid.started_by, grid.ray_address) for grid in grids}
    devices = {config.hardware.device for config in configs}
    if len(configs) <= 1 or len(ranks) > 1 or len(devices) > 1 or grids[0].started_by != "ray":
        yield None
        return
    from .ray_launcher import RayLauncher

    launcher = RayLauncher(keep=True)
    try:
        yield launcher
    finally:
        launcher.shutdown()
