"""The options of a command line (`-m`, `--cfg job`): what each takes, and which of hydra's are refused."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from ..conf.build import dotted_keys, load_command
from ..conf.errors import ConfigError, did_you_mean, nearest
from .commands import Command


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line."""

    name: str
    short: str
    meaning: str
    value: str = ""  # the value's name in help; empty: help lists `values`
    values: tuple[str, ...] = ()  # the only values that it takes; empty: any, if `value` is given, else none
    default: str = ""  # of the value, where that may be left out
    with_runs: bool = True  # whether only commands that hydra composes have it

    @property
    def usage(self) -> str:
        """The option with its value, as a line of help shows it: `-n, --name VALUE`."""
        value = self.value or "|".join(self.values)
        value = f"[{value}]" if self.default else value
        return ", ".join(name for name in (self.short, self.name) if name) + (f" {value}" if value else "")


OPTIONS = (
    Option(
        "--help",
        "-h",
        "after a command: the keys that matter; --help all: every key; --help WORD: those that tell of a word",
        with_runs=False,
    ),
    Option("--version", "-V", "the version", with_runs=False),
    Option(
        "--shell-completion",
        "-sc",
        "print the code that makes a shell complete commands and keys, or that undoes it",
        value="install=SHELL|uninstall=SHELL",
        with_runs=False,
    ),
    Option("--multirun", "-m", "a sweep: a value with commas is several runs"),
    Option("--cfg", "-c", "print the composed config, run nothing", values=("job", "hydra", "all")),
    Option("--package", "-p", "with --cfg: print only this part of it", value="KEY"),
    Option("--resolve", "", "with --cfg: print values in place of interpolations"),
    Option(
        "--info",
        "-i",
        "print what hydra composes from, run nothing: all, config, defaults, defaults-tree, plugins or searchpath",
        default="all",
        value="WHAT",
        values=("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    ),
    Option("--hydra-help", "", "hydra's own help"),
    Option("--run", "-r", "one run; this is the default"),
)
INSTEAD = {
    ("--config-name", "-cn"): "a command has its own config",
    ("--config-path", "-cp"): "a command has its own config",
    ("--config-dir", "-cd"): "groups have the choices that gapless ships; a model of your own is model=FOLDER, "
    "a policy scheduler=./FILE.py",
    ("--experimental-rerun",): "give the overrides of the run again; they are in .hydra/overrides.yaml of its folder",
}
"""Options of hydra's that are refused, and what to give instead."""


def options_of(command: Command) -> list[Option]:
    """Return the options that a command has."""
    return [option for option in OPTIONS if not (option.with_runs and command.positional)]


def parse(arguments: Sequence[str], command: Command) -> tuple[dict[str, str], list[str]]:
    """Split `arguments` into options by their long name, each with its value ("" where it takes none), and the rest.

    Raises:
        ConfigError: an option is unknown or refused, its value is wrong, or two options do not go together.
    """
    by_name = {name: option for option in options_of(command) for name in (option.name, option.short) if name}
    found: dict[str, str] = {}
    others: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if not argument.startswith("-") or argument == "-":
            others.append(argument)
            continue
        name, has_value, value = argument.partition("=")
        option = by_name.get(name)
        if option is None:
            raise ConfigError(_unknown(name, value or (left[0] if left else ""), command))
        takes_value = bool(option.value or option.values)
        if has_value and not takes_value:
            raise ConfigError(f"{argument}: {name} takes no value")
        if takes_value and not has_value:
            follows = bool(left) and not left[0].startswith("-")
            if option.default and not (follows and left[0] in option.values):
                value = option.default
            elif follows:
                value = left.pop(0)
            else:
                raise ConfigError(f"{name}: needs a value: {option.value or ', '.join(option.values)}")
        if option.values and value not in option.values:
            raise ConfigError(f"{name} {value}: unknown{nearest(value, option.values)}")
        found[option.name] = value
    _check_together(found)
    return found, others


def _check_together(found: dict[str, str]) -> None:
    alone = [name for name in ("--multirun", "--run", "--cfg", "--info", "--hydra-help") if name in found]
    if len(alone) > 1:
        raise ConfigError(f"{alone[0]} and {alone[1]}: give one of them")
    for name in ("--package", "--resolve"):
        if name in found and "--cfg" not in found:
            raise ConfigError(f"{name}: only with --cfg, as in --cfg job {name}{' KEY' if name == '--package' else ''}")


def _unknown(name: str, value: str, command: Command) -> str:
    """Write the error of an option that the command lacks: why, or which option or key was probably meant."""
    for names, instead in INSTEAD.items():
        if name in names:
            return f"{name}: {instead}"
    known = [option.name for option in options_of(command)]
    if any(name in (option.name, option.short) for option in OPTIONS):
        return f"{name}: {command.name} has no such option; valid: {', '.join(known)}"
    if hint := did_you_mean(name, known, 0.8):
        return f"{name}: unknown option{hint}"
    key = _key_like(name.lstrip("-").replace("-", "_"), command)
    if key is None:
        return f"{name}: unknown option{nearest(name, known)}"
    value = "VALUE" if not value or value.startswith("-") or "=" in value else value
    return f"{name}: unknown option; did you mean '{key}={value}'?"


def _key_like(name: str, command: Command) -> str | None:
    """Find the key that the user probably meant by the option `--name`; None if none is near."""
    keys = [*load_command(command.name)[1], *(key for key, _ in dotted_keys(command.config))]
    by_leaf: dict[str, str] = {}
    for key in keys:
        by_leaf.setdefault(key.rpartition(".")[2], key)
    if name in keys:
        return name
    if name in by_leaf:
        return by_leaf[name]
    longer = [key for key in keys if "." not in key and key.startswith(name)]
    near = longer if len(longer) == 1 else difflib.get_close_matches(name, by_leaf, n=1, cutoff=0.75)
    return by_leaf[near[0]] if near else None
