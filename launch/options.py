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
    values: tuple[str, ...] = ()  # one of them follows; empty: no value
    with_runs: bool = True  # whether only commands composed by hydra have it

    @property
    def names(self) -> tuple[str, str]:
        """The option's long and short names."""
        return self.name, self.short

    @property
    def usage(self) -> str:
        """The option with its values for help: `-n, --name VALUE`."""
        return f"{self.short}, {self.name} {'|'.join(self.values)}".rstrip()


OPTIONS = (
    Option(
        "--help",
        "-h",
        "after a command: its most important keys; --help all: all keys; --help WORD: keys that match a word",
        with_runs=False,
    ),
    Option("--version", "-V", "print the version", with_runs=False),
    Option("--multirun", "-m", "sweep: run each of comma-separated values"),
    Option("--cfg", "-c", "print the composed config and exit", values=("job",)),
)
INSTEAD = {
    ("--config-name", "-cn"): "not supported; each command has its own config",
    ("--config-path", "-cp"): "not supported; each command has its own config",
    ("--config-dir", "-cd"): "not supported; for your own model use model=FOLDER, for your own policy "
    "scheduler=./FILE.py",
    ("--experimental-rerun",): "not supported; repeat the overrides in .hydra/overrides.yaml of the run folder",
    ("--package", "-p", "--resolve"): "not supported; --cfg job prints the whole config",
    ("--info", "-i", "--hydra-help"): "not supported; use --cfg job, which prints the composed config, or --help all",
    ("--shell-completion", "-sc"): "not supported; --help WORD after a command searches its keys",
    ("--run", "-r"): "not needed; without -m a run is single",
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
        if has_value and not option.values:
            raise ConfigError(f"{argument}: {name} takes no value")
        if option.values and not has_value:
            if not left or left[0].startswith("-"):
                raise ConfigError(f"{name}: missing value: {', '.join(option.values)}")
            value = left.pop(0)
        if option.values and value not in option.values:
            raise ConfigError(f"{name} {value}: unknown{nearest(value, option.values)}")
        found[option.name] = value
    if "--multirun" in found and "--cfg" in found:
        raise ConfigError("--multirun and --cfg are exclusive; give one of them")
    return found, others


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
