"""Shell completion of commands, options, keys and choices: `eval "$(gapless --shell-completion install=bash)"`.

The shell function calls `--shell-completion query=SHELL` with the line in COMP_LINE and the cursor in COMP_POINT, and
reads one candidate per line. Without candidates the shell completes files.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterable, Mapping
from importlib import resources
from types import MappingProxyType

from ..conf.build import dotted_keys, group_names, load_command
from ..conf.errors import ConfigError, nearest
from .commands import COMMANDS, Command
from .options import OPTIONS, Option, options_of

_UNINSTALL = {
    "bash": "complete -r gapless; unset -f _gapless",
    "zsh": "compdef -d gapless; unfunction _gapless",
    "fish": "complete -e -c gapless; functions -e _gapless",
}
_OF_HYDRA: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"hydra.run.dir": (), "hydra.sweep.dir": (), "hydra/launcher": ("basic", "joblib")}
)


def answer(request: str) -> str:
    """Return the output of `--shell-completion REQUEST`.

    Raises:
        ConfigError: unknown request or shell.
    """
    what, _, shell = request.partition("=")
    if what not in ("install", "uninstall", "query"):
        raise ConfigError(f"--shell-completion={request}: must be install=SHELL or uninstall=SHELL")
    if shell not in _UNINSTALL:
        raise ConfigError(f"--shell-completion={request}: unknown shell{nearest(shell, _UNINSTALL)}")
    if what == "install":
        return resources.files(__package__).joinpath("completions", shell).read_text(encoding="utf-8").rstrip()
    if what == "uninstall":
        return _UNINSTALL[shell]
    line = os.environ.get("COMP_LINE", "")
    point = os.environ.get("COMP_POINT", "")
    found = candidates(line[: int(point)] if point.isdecimal() else line)
    if shell != "fish":  # bash and zsh are set to add no space, as none may follow `key=`
        found = [text if text.endswith(".") or "=" in text else f"{text} " for text in found]
    return "\n".join(found)


def candidates(line: str) -> list[str]:
    """Return completions of the last word of `line`. Dotted keys are completed up to the next dot."""
    words = line.split()[1:]  # without the program name
    word = words.pop() if words and not line[-1].isspace() else ""
    if not words:
        found: Iterable[str] = [*COMMANDS, *_names(option for option in OPTIONS if not option.with_runs)]
    elif words[0] in COMMANDS:
        command = COMMANDS[words[0]]
        found = _of_option(words[-1], command) or _of_command(word, command)
    else:
        found = ()
    return sorted({text for text in found if text.startswith(word)})


def _names(options: Iterable[Option]) -> list[str]:
    return [option.name for option in options]


def _of_option(before: str, command: Command) -> tuple[str, ...]:
    """Return the values of the option before the word."""
    return next((option.values for option in options_of(command) if before in option.names), ())


def _of_command(word: str, command: Command) -> Iterable[str]:
    if word.startswith("-"):
        return _names(options_of(command))
    key, has_value, value = word.partition("=")
    mark = key[: len(key) - len(key.lstrip("+"))]
    if has_value:
        done = value[: len(value) - len(re.split(r"[,\[]", value)[-1])]  # earlier choices of a sweep
        return [f"{key}={done}{choice}" for choice in _choices(key[len(mark) :], command)]
    groups = () if command.positional else load_command(command.name)[1]
    of_hydra = () if command.positional else _OF_HYDRA
    keys = {*groups, *of_hydra, *(name for name, _ in dotted_keys(command.config) if name != command.positional)}
    return [mark + _to_next_dot(name, len(key) - len(mark)) for name in keys]


def _to_next_dot(key: str, start: int) -> str:
    dot = key.find(".", start)
    return f"{key}=" if dot < 0 else key[: dot + 1]


def _choices(key: str, command: Command) -> Iterable[str]:
    """Return the possible values of a key; none if they cannot be enumerated."""
    if key in _OF_HYDRA:
        return _OF_HYDRA[key]
    if key in load_command(command.name)[1]:
        return group_names(key)
    hint = dict(dotted_keys(command.config)).get(key)
    if hint is bool:
        return ("true", "false")
    return [
        str(value)
        for part in (hint, *typing.get_args(hint))
        for value in typing.get_args(part)
        if typing.get_origin(part) is typing.Literal
    ]
