"""The command line: `gapless COMMAND [hydra overrides]`.

Composes and checks the whole run first; then hydra makes the run folder and the command's module does the work
(`report`, which runs nothing, goes without hydra). What a user did wrong ends with one line on standard error and exit
code 2, a pipeline that failed with 1, a signal with 128 and its number. A command's `run` may return a code of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..conf.errors import ConfigError, nearest
from ..conf.schema import EngineConfig, GenerateConfig
from .commands import COMMANDS, Command
from .output_path import check_folder
from .plugins import blame
from .signals import Ended, ended_by_signals

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ..runtime.pipeline.launcher import Launcher

PROGRAM = "gapless"


class StandardInput:
    """Standard input, read once however many runs a sweep has."""

    @property
    def is_terminal(self) -> bool:
        return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()

    @cached_property
    def data(self) -> bytes:
        return sys.stdin.buffer.read()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with ended_by_signals():
            code = _dispatch(arguments)
            if sys.stdout is not None:  # closed by whoever started us
                sys.stdout.flush()
    except ConfigError as error:
        return _fail(error, 2)
    except Ended as ended:
        print(f"{PROGRAM}: {ended.word}", file=sys.stderr)
        return ended.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        is_ours = isinstance(error, RuntimeError) and _is_pipeline_error(error)
        if not is_ours and (line := blame(error)) is not None:
            return _fail(error, 2, line)
        if not (is_ours or isinstance(error, ValueError | OSError)):
            raise
        return _fail(error, 2 if isinstance(error, ValueError) else 1)
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        from . import help as texts

        print(texts.overview(COMMANDS.values()))
        return 0
    if arguments[0] in ("--version", "-V"):
        print(f"{PROGRAM} {metadata.version(PROGRAM)}")
        return 0
    if arguments[0] in ("--shell-completion", "-sc"):
        from . import completion

        print(completion.answer("".join(arguments[1:])))
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        if name.startswith("-"):
            from .options import OPTIONS

            if any(name.partition("=")[0] in (option.name, option.short) for option in OPTIONS):
                raise ConfigError(f"{name}: give a command first, as in {PROGRAM} generate {name}")
            valid = [option.name for option in OPTIONS if not option.with_runs]
            raise ConfigError(f"{name}: unknown option{nearest(name, valid)}")
        raise ConfigError(f"{name}: unknown command{nearest(name, COMMANDS)}")
    if "matplotlib" not in sys.modules:  # figures go into files; a notebook's backend may be missing here
        os.environ["MPLBACKEND"] = "agg"
    return _run_command(COMMANDS[name], rest)


def _run_command(command: Command, arguments: list[str]) -> int:
    from .options import parse

    if any(argument in ("--help", "-h") for argument in arguments):
        from . import help as texts

        print(texts.command(command))
        return 0
    options, others = parse(arguments, command)
    if "--version" in options:
        return _dispatch(["--version"])
    if "--shell-completion" in options:
        return _dispatch(["--shell-completion", options["--shell-completion"]])
    if command.positional:
        _run_plain(command, others)
        return 0
    if options.keys() & {"--cfg", "--info", "--hydra-help"}:
        from .shown import show

        show(command, others, options)
        return 0
    return _run(command, others, multirun="--multirun" in options)


def _run_plain(command: Command, arguments: list[str]) -> None:
    from . import compose

    assert command.positional
    config = compose.from_arguments(arguments, command.config, command.positional, command.others)
    module = import_module(f".{command.module}", __package__)
    module.run(config, module.prepare(config, StandardInput()), Path.cwd())


def _run(command: Command, overrides: list[str], *, multirun: bool) -> int:
    """Run the command once, or at each point of a sweep. Returns the exit code."""
    from . import compose

    cls = command.config
    assert issubclass(cls, EngineConfig)
    rewritten = compose.rewrite(overrides, cls, command.name, multirun=multirun)
    if not command.has_ranks:  # numpy's threads would start, spin and multiply nothing
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if multirun or any(text.startswith("++hydra.mode=") for text in rewritten):
        return _run_by_hydra(command, cls, rewritten, multirun=multirun)
    return _run_once(command, cls, rewritten)


def _run_once(command: Command, cls: type[EngineConfig], rewritten: list[str]) -> int:
    from ..runtime.core.garbage_collection import without_collector
    from .job import compose_job

    module = import_module(f".{command.module}", __package__)
    with without_collector():
        job = compose_job(rewritten, cls, command.name)
        own = module.prepare(job.config, StandardInput())
    return job.run(lambda folder: module.run(job.config, own, folder))


def _run_by_hydra(command: Command, cls: type[EngineConfig], rewritten: list[str], *, multirun: bool) -> int:
    """Prepare all runs, then let hydra make the folder of each and call the command in it."""
    from . import compose

    stdin = StandardInput()
    module = import_module(f".{command.module}", __package__)
    kind: Literal["run", "sweep"] = "sweep" if multirun else "run"
    if (folder := compose.output_folder(rewritten, command.name, kind)) is not None:
        check_folder(Path(folder), f"hydra.{kind}.dir")
    configs = compose.compose_all(rewritten, cls, command.name, multirun=multirun)
    prepared = {config: module.prepare(config, stdin) for config in dict.fromkeys(configs)}
    outputs = [config.outputs for config in configs if isinstance(config, GenerateConfig) and config.outputs]
    if len(set(outputs)) < len(outputs):
        raise ConfigError(f"outputs={outputs[0]}: the runs of a sweep would overwrite it; without it each has its own")

    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    full_error = os.environ.get("HYDRA_FULL_ERROR")
    swept = compose.swept_families(rewritten, cls) if multirun else set()
    sweep_dir = folder if multirun else None
    if sweep_dir is not None:
        rewritten.append(f"++hydra.sweep.dir={compose.quote(sweep_dir)}")
    first: dict[EngineConfig, int] = {}
    same_as = [first.setdefault(config, number) for number, config in enumerate(configs)]

    codes: list[int] = []  # of the runs in this process

    def task(composed: DictConfig) -> None:
        _set_environment("HYDRA_FULL_ERROR", full_error)
        state = HydraConfig.get()
        folder = Path(state.runtime.output_dir)
        dropped = compose.drop_foreign(composed, cls, swept)
        config = compose.to_config(composed, cls)
        if multirun:
            point = " ".join(text.lstrip("+") for text in state.overrides.task)
            print(f"{PROGRAM}: run {state.job.num}: {point}", file=sys.stderr, flush=True)
        if dropped:
            if multirun and (other := same_as[state.job.num]) != state.job.num:
                what = f"run {state.job.num} is run {other} again, without {', '.join(dropped)}"
                print(f"{PROGRAM}: {what}: skipped", file=sys.stderr, flush=True)
                shutil.rmtree(folder)
                return
            if state.output_subdir:
                OmegaConf.save(composed, folder / state.output_subdir / "config.yaml")
        try:
            # Nothing is prepared in a process of its own, for a second run of one config, or for a config that holds
            # the time of day.
            own = prepared.pop(config) if config in prepared else module.prepare(config, stdin)
            brief = {"brief": True} if multirun and command.compares else {}
            codes.append(module.run(config, own, folder, launcher, **brief) or 0)
        except Exception as error:
            raise _Escape(error) from error

    start = hydra.main(config_path=f"pkg://{compose.CONFIG_MODULE}", config_name=command.name, version_base="1.3")(task)
    before = sys.argv
    _set_environment("HYDRA_FULL_ERROR", "1")  # hydra then raises instead of printing a traceback
    sys.argv = [f"{PROGRAM} {command.name}", *(["--multirun"] if multirun else []), *rewritten]
    try:
        alone = any(text.startswith("hydra/launcher=") for text in rewritten)  # runs are in processes of their own
        if alone:
            prepared.clear()
        with _kept_launcher(configs if command.has_ranks and not alone else ()) as launcher:
            start()
    except _Escape as escape:
        raise escape.error from escape.error.__cause__
    finally:
        sys.argv = before
        _set_environment("HYDRA_FULL_ERROR", full_error)
    if sweep_dir is not None and len(first) > 1:
        if command.compares:
            from . import report

            report.compare_sweep(sweep_dir)
        else:
            print(f"{PROGRAM}: to compare these runs: {PROGRAM} report {sweep_dir}", file=sys.stderr)
    return max(codes, default=0)


@contextmanager
def _kept_launcher(configs: Sequence[EngineConfig]) -> Iterator[Launcher | None]:
    """Make a launcher that keeps Ray and its actors from one run to the next, for a sweep whose ranks are all alike."""
    grids = [config.parallel for config in configs]
    ranks = {(grid.pp, grid.tp, grid.launcher, grid.ray_address) for grid in grids}
    devices = {config.hardware.device for config in configs}
    if len(configs) <= 1 or len(ranks) > 1 or len(devices) > 1 or grids[0].launcher != "ray":
        yield None
        return
    from .ray_launcher import RayLauncher

    launcher = RayLauncher(keep=True)
    try:
        yield launcher
    finally:
        launcher.shutdown()


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


class _Escape(BaseException):
    """Carries a command's exception past hydra, which would print it in its own way and exit."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _is_pipeline_error(error: RuntimeError) -> bool:
    from ..runtime.pipeline.protocol import PipelineError

    return isinstance(error, PipelineError)


def _fail(error: Exception, code: int, line: str | None = None) -> int:
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    named = isinstance(error, OSError) and error.filename
    text = line or (f"{error.filename}: {error.strerror}" if named else str(error))  # type: ignore[attr-defined]
    text = " ".join(text.split()) or type(error).__name__
    print(f"{PROGRAM}: error: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
