"""The command line: `gapless COMMAND [hydra overrides]`.

The whole run is composed and validated first. Then hydra creates the run folder, and the command's module does the
work. Commands that read runs (`report`, `diff`, `explain`) do not use hydra.

An error is one line on standard error. The exit code is 2 for user errors, 1 for a failed pipeline, and 128 plus the
number for a signal. A command's `run` may return its own code.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path

from ..conf.errors import ConfigError, nearest
from ..conf.schema import EngineConfig
from ..kernels import processor
from .commands import COMMANDS, Command
from .plugins import blame
from .signals import Ended, ended_by_signals
from .stderr_log import PROGRAM, messages_on_stderr

_log = logging.getLogger(f"{PROGRAM}.launch.cli")  # its `__name__` may be `__main__`

_GONE = "the working directory has been deleted; change to an existing one"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # terminals that are not UTF-8 show `?` for other characters
            stream.reconfigure(errors="replace")
    with messages_on_stderr():
        return _main(list(sys.argv[1:] if argv is None else argv))


def _main(arguments: list[str]) -> int:
    try:
        with ended_by_signals():
            code = _dispatch(arguments)
            if sys.stdout is not None:  # None if closed by the parent process
                sys.stdout.flush()
    except ConfigError as error:
        return _fail(error, 2)
    except Ended as ended:
        _log.info(ended.word)
        return ended.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"{PROGRAM}."):
            raise
        return _fail(error, 2, f"{PROGRAM} {arguments[0]}: needs {error.name}, which this installation lacks")
    except Exception as error:
        if os.strerror(errno.EMFILE) in str(error):  # an OSError, or a RuntimeError from torch or a rank
            return _fail(error, 1, f"{os.strerror(errno.EMFILE)}: raise the limit with `ulimit -n 4096`")
        if isinstance(error, RuntimeError):
            from ..runtime.pipeline.protocol import PipelineError

            if isinstance(error, PipelineError):
                return _fail(error, 1)
        if (line := blame(error)) is not None:  # raised in a plug-in or a policy file
            return _fail(error, 2, line)
        if isinstance(error, ValueError):
            return _fail(error, 2)
        if isinstance(error, OSError):
            return _fail(error, 1, _GONE if _is_folder_gone() else None)
        raise
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        from . import help as texts

        print(texts.overview(COMMANDS.values()))
        return 0
    if arguments[0] in ("--version", "-V"):
        print(f"{PROGRAM} {metadata.version(PROGRAM)}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        if name.startswith("-"):
            from .options import OPTIONS

            if any(name.partition("=")[0] in option.names for option in OPTIONS):
                raise ConfigError(f"{name}: goes after a command, as in {PROGRAM} generate {name}")
            valid = [option.name for option in OPTIONS if not option.with_runs]
            raise ConfigError(f"{name}: unknown option{nearest(name, valid)}")
        raise ConfigError(f"{name}: unknown command{nearest(name, COMMANDS)}")
    if "matplotlib" not in sys.modules:  # figures are files; a notebook's backend may be missing here
        os.environ["MPLBACKEND"] = "agg"
    if processor.VARIABLE in os.environ:
        processor.level()  # an invalid value fails before anything starts
    return _run_command(COMMANDS[name], rest)


def _run_command(command: Command, arguments: list[str]) -> int:
    from .options import parse

    if any(argument.partition("=")[0] in ("--help", "-h") for argument in arguments):
        from . import help as texts

        print(texts.command(command, _asked(arguments)))
        return 0
    if command.takes_vllm_options:
        from .serve_arguments import as_overrides, with_default_model

        arguments = with_default_model(as_overrides(arguments, command))
    options, others = parse(arguments, command)
    if "--version" in options:
        return _dispatch(["--version"])
    if command.positional:
        _run_plain(command, others)
        return 0
    if "--cfg" in options:
        from .compose import config_text

        assert issubclass(command.config, EngineConfig)
        print(config_text(others, command.config, command.name))
        return 0
    from .job import run

    return run(command, others, multirun="--multirun" in options or "hydra.mode=MULTIRUN" in others)


def _asked(arguments: list[str]) -> str:
    """Return WORD of `--help WORD` or `--help=WORD`."""
    place = next(i for i, argument in enumerate(arguments) if argument.partition("=")[0] in ("--help", "-h"))
    after = [word for word in arguments[place + 1 :] if "=" not in word and not word.startswith("-")]
    return arguments[place].partition("=")[2] or next(iter(after), "")


def _run_plain(command: Command, arguments: list[str]) -> None:
    from .compose import from_arguments
    from .prompts import StandardInput

    assert command.positional
    config = from_arguments(arguments, command.config, command.positional, command.others)
    module = import_module(f".{command.name}", __package__)
    module.run(config, module.prepare(config, StandardInput()), Path.cwd())


def _is_folder_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _fail(error: Exception, code: int, line: str | None = None) -> int:
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    named = isinstance(error, OSError) and error.filename
    text = line or (f"{error.filename}: {error.strerror}" if named else str(error))  # type: ignore[attr-defined]
    _log.error(" ".join(text.split()) or type(error).__name__)
    return code


if __name__ == "__main__":
    sys.exit(main())
