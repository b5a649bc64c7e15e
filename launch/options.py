"""Command-line options (`-m`, `--cfg job`), and unsupported hydra options."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from ..conf.build import dotted_keys, load_command
from ..conf.errors import ConfigError, did_you_mean, nearest
from .commands import Command


@dataclass(frozen=True, slots=True)
class Option:
    """A command-line option."""

    name: str
    short: str
    meaning: str
    value: str = ""  # placeholder of the value in help; empty: `values`
    values: tuple[str, ...] = ()  # the allowed values; empty: any if `value` is given, else none
    default: str = ""  # of an optional value
    with_runs: bool = True  # whether only commands composed by hydra have it

    @property
    def names(self) -> tuple[str, ...]:
        """Its long name, and its short one if it has one."""
        return (self.name, self.short) if self.short else (self.name,)

    @property
    def takes_value(self) -> bool:
        """Whether a value follows, or may follow."""
        return bool(self.value or self.values)

    @property
    def usage(self) -> str:
        """The option with its value for help: `-n, --name VALUE`."""
        value = self.value or "|".join(self.values)
        value = f"[{value}]" if self.default else value
        return ", ".join(reversed(self.names)) + (f" {value}" if value else "")


OPTIONS = (
    Option(
        "--help",
        "-h",
        "after a command: its most important keys; --help all: all keys; --help WORD: keys that match a word",
        with_runs=False,
    ),
    Option("--version", "-V", "print the version", with_runs=False),
    Option(
        "--shell-completion",
        "-sc",
        "print shell code that installs or removes completion",
        value="install=SHELL|uninstall=SHELL",
        with_runs=False,
    ),
    Option("--multirun", "-m", "sweep: run each of comma-separated values"),
    Option("--cfg", "-c", "print the composed config and exit", values=("job", "hydra", "all")),
    Option("--package", "-p", "with --cfg: print only this part of the config", value="KEY"),
    Option("--resolve", "", "with --cfg: resolve interpolations"),
    Option(
        "--info",
        "-i",
        "print hydra's composition info and exit: all, config, defaults, defaults-tree, plugins or searchpath",
        default="all",
        value="WHAT",
        values=("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    ),
    Option("--hydra-help", "", "hydra's own help"),
    Option("--run", "-r", "single run (default)"),
)
INSTEAD = {
    ("--config-name", "-cn"): "not supported; each command has its own config",
    ("--config-path", "-cp"): "not supported; each command has its own config",
    ("--config-dir", "-cd"): "not supported; for your own model use model=FOLDER, for your own policy "
    "scheduler=./FILE.py",
    ("--experimental-rerun",): "not supported; repeat the overrides in .hydra/overrides.yaml of the run folder",
}
"""Unsupported hydra options, and their alternatives."""


def options_of(command: Command) -> list[Option]:
    """Return the options that a command has."""
    return [option for option in OPTIONS if not (option.with_runs and command.positional)]


def parse(arguments: Sequence[str], command: Command) -> tuple[dict[str, str], list[str]]:
    """Split `arguments` into options by long name, with their values or "", and other arguments.

    Raises:
        ConfigError: an option is unknown or unsupported, its value is invalid, or two options conflict.
    """
    by_name = {name: option for option in options_of(command) for name in option.names}
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
        if has_value and not option.takes_value:
            raise ConfigError(f"{argument}: {name} takes no value")
        if option.takes_value and not has_value:
            follows = bool(left) and not left[0].startswith("-")
            if option.default and not (follows and left[0] in option.values):
                value = option.default
            elif follows:
                value = left.pop(0)
            else:
                raise ConfigError(f"{name}: missing value: {option.value or ', '.join(option.values)}")
        if option.values and value not in option.values:
            raise ConfigError(f"{name} {value}: unknown{nearest(value, option.values)}")
        found[option.name] = value
    _check_together(found)
    return found, others


def _check_together(found: dict[str, str]) -> None:
    alone = [name for name in ("--multirun", "--run", "--cfg", "--info", "--hydra-help") if name in found]
    if len(alone) > 1:
        raise ConfigError(f"{alone[0]} and {alone[1]} are exclusive; give one of them")
    for name in ("--package", "--resolve"):
        if name in found and "--cfg" not in found:
            raise ConfigError(f"{name}: requires --cfg, as in --cfg job {name}{' KEY' if name == '--package' else ''}")


def _unknown(name: str, value: str, command: Command) -> str:
    """Return the error of an unknown option: the reason, or the closest option or key."""
    for names, instead in INSTEAD.items():
        if name in names:
            return f"{name}: {instead}"
    known = [option.name for option in options_of(command)]
    if any(name in option.names for option in OPTIONS):
        return f"{name}: not an option of {command.name}; valid: {', '.join(known)}"
    if hint := did_you_mean(name, known, 0.8):
        return f"{name}: unknown option{hint}"
    key = _key_like(name.lstrip("-").replace("-", "_"), command)
    if key is None:
        return f"{name}: unknown option{nearest(name, known)}"
    value = "VALUE" if not value or value.startswith("-") or "=" in value else value
    return f"{name}: unknown option; did you mean '{key}={value}'?"


def _key_like(name: str, command: Command) -> str | None:
    """Return the key closest to the option `--name`; None if none is close."""
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
