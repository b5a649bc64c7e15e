"""The command line: `gapless COMMAND [hydra overrides]`.

Composes and checks the whole run first; then hydra makes the run folder and the command's module does the work. What a
user did wrong ends with one line on standard error and exit code 2, a pipeline that failed with 1, Ctrl-C with 130.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module, metadata
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..conf.errors import ConfigError, nearest
from ..conf.schema import EngineConfig, GenerateConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig

PROGRAM = "gapless"


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its config's schema, and the module of this room with `check(config, stdin)` and
    `run(config, run_dir, stdin)`. `conf/<name>.yaml` is its hydra config."""

    name: str
    summary: str
    config: type[EngineConfig]
    module: str
    examples: tuple[str, ...]


COMMANDS = {
    command.name: command
    for command in (
        Command(
            "generate",
            "runs prompts through the pipeline; texts to the terminal, JSONL and a report to the run folder",
            GenerateConfig,
            "generate",
            (
                'gapless generate prompt="import os"',
                "gapless generate parallel=pp2 prompts=shipped scheduler.chunk=128",
                "gapless generate model=./my-llama parallel=pp2 prompts=prompts.jsonl sampling.max_tokens=64",
                "gapless generate -m scheduler=sarathi,orca_best parallel=pp2 prompts=shipped",
            ),
        ),
    )
}


class StandardInput:
    """The text of standard input, read once however many runs a sweep has."""

    @property
    def is_terminal(self) -> bool:
        return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()

    @cached_property
    def text(self) -> str:
        try:
            return sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input: not UTF-8 ({error.reason} at byte {error.start})") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        _dispatch(arguments)
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
    except ValueError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_pipeline_error(error):
            raise
        return _fail(error, 1)
    return 0


def _dispatch(arguments: list[str]) -> None:
    from . import help as texts

    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(texts.overview(COMMANDS.values()))
        return
    if arguments[0] in ("--version", "-V"):
        print(f"{PROGRAM} {metadata.version(PROGRAM)}")
        return
    name, *rest = arguments
    if name not in COMMANDS:
        what = "unknown option" if name.startswith("-") else "unknown command"
        valid = ("--help", "--version") if name.startswith("-") else COMMANDS
        raise ConfigError(f"{name}: {what}{nearest(name, valid)}")
    command = COMMANDS[name]
    if any(argument in ("--help", "-h") for argument in rest):
        print(texts.command(command))
        return
    flags = [argument for argument in rest if argument.startswith("-")]
    for flag in flags:
        if flag not in ("-m", "--multirun"):
            raise ConfigError(f"{flag}: unknown option{nearest(flag, ('--help', '--multirun', '-m'))}")
    _run(command, [argument for argument in rest if argument not in flags], multirun=bool(flags))


def _run(command: Command, overrides: list[str], *, multirun: bool) -> None:
    """Checks all that is asked for, then lets hydra make the folder of each run and call the command in it."""
    from . import compose

    rewritten = compose.rewrite(overrides, command.config, command.name)
    stdin = StandardInput()
    module = import_module(f".{command.module}", __package__)
    configs = compose.compose_all(rewritten, command.config, command.name, multirun=multirun)
    for config in configs:
        module.check(config, stdin)
    outputs = [config.outputs for config in configs if isinstance(config, GenerateConfig) and config.outputs]
    if len(set(outputs)) < len(outputs):
        raise ConfigError(f"outputs={outputs[0]}: the runs of a sweep would overwrite it; without it each has its own")

    import hydra
    from hydra.core.hydra_config import HydraConfig

    full_error = os.environ.get("HYDRA_FULL_ERROR")

    def task(composed: DictConfig) -> None:
        _set_environment("HYDRA_FULL_ERROR", full_error)
        state = HydraConfig.get()
        if multirun:
            print(f"{PROGRAM}: run {state.job.num}: {' '.join(state.overrides.task)}", file=sys.stderr, flush=True)
        try:
            module.run(compose.to_config(composed, command.config), Path(state.runtime.output_dir), stdin)
        except Exception as error:
            raise _Escape(error) from error

    start = hydra.main(config_path=f"pkg://{compose.CONFIG_MODULE}", config_name=command.name, version_base="1.3")(task)
    before = sys.argv
    _set_environment("HYDRA_FULL_ERROR", "1")  # hydra then raises instead of printing a traceback
    sys.argv = [f"{PROGRAM} {command.name}", *(["--multirun"] if multirun else []), *rewritten]
    try:
        start()
    except _Escape as escape:
        raise escape.error from escape.error.__cause__
    finally:
        sys.argv = before
        _set_environment("HYDRA_FULL_ERROR", full_error)


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
    from ..runtime.pipeline import PipelineError

    return isinstance(error, PipelineError)


def _fail(error: Exception, code: int) -> int:
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    text = " ".join(text.split()) or type(error).__name__
    print(f"{PROGRAM}: error: {text}", file=sys.stderr)
    return code


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM unwinds like any exit, so that what was started is closed."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
