"""The texts of `gapless --help` and `gapless COMMAND --help`: every key with its default, type and meaning."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..conf.build import GROUPS, describe, dotted_keys, group_names, leaves, load_command, load_group
from ..conf.meanings import meanings
from ..conf.schema import EngineConfig
from .options import OPTIONS
from .overrides import value_text

if TYPE_CHECKING:
    from .commands import Command

WIDTH = 118

def overview(commands: Iterable[Command]) -> str:
    """Write the text of `gapless --help`."""
    commands = list(commands)
    listed = "\n".join(_entry(f"  {c.name}", c.summary, 12) for c in commands)
    options = "\n".join(_entry(f"  {option.usage}", option.meaning, 20) for option in OPTIONS)
    examples = "\n".join(f"  {example}" for c in commands for example in c.examples)
    return f"""\
gapless serves large language models over pipeline and tensor parallelism without gaps in the pipeline (SARATHI).

usage: gapless COMMAND [-m] [GROUP=CHOICE ...] [KEY=VALUE ...]
       gapless report FOLDER ... [KEY=VALUE ...]

commands:
{listed}

options:
{options}

examples:
{examples}"""


def command(command: Command) -> str:
    """Write the text of `gapless COMMAND --help`."""
    own, chosen = load_command(command.name)
    defaults = dict(leaves(own))
    for group, choice in chosen.items():
        if choice is not None:
            defaults |= {f"{group}.{key}": value for key, value in leaves(load_group(group, choice))}
    usage = "FOLDER ... [KEY=VALUE ...]" if command.positional else "[-m] [GROUP=CHOICE ...] [KEY=VALUE ...]"
    lines = [f"gapless {command.name}: {command.summary}", "", f"usage: gapless {command.name} {usage}", ""]
    if chosen:
        lines.append("groups (GROUP=CHOICE):")
    for group, choice in chosen.items():
        lines += [
            _entry(f"  {group}={value_text(choice)}", GROUPS[group], 28),
            *textwrap.wrap("choices: " + ", ".join(group_names(group)), WIDTH, initial_indent=" " * 28,
                           subsequent_indent=" " * 28, break_on_hyphens=False),
        ]
    if "policies" in defaults:
        how = "by turns on one started pipeline" if command.has_ranks else "one after the other"
        lines += _wrapped(f"scheduler=NAME,NAME without -m runs each policy {how}, over the same requests; a key of "
                          "scheduler then applies to those that have it.", "  ")
    lines += ["", "keys (KEY=VALUE), with the defaults of the groups above:"] if chosen else ["keys (KEY=VALUE):"]
    section, meaning = "", meanings(command.config)
    for key, hint in _ordered(command):
        parent = key.rpartition(".")[0]
        if parent != section:
            section = parent
            lines.append("")
        default = f"={value_text(defaults[key])}" if key in defaults else ""
        lines.append(_entry(f"  {key}{default}", f"{meaning[key]} ({describe(hint)})", 44))
    if not command.positional:
        lines += [
            "",
            "Texts and paths need no quotes of their own within the shell's: prompt=\"Hello, world (=x)\".",
            f"The run folder is {command.folder}; hydra.run.dir=FOLDER names another. HYDRA_FULL_ERROR=1 shows "
            "tracebacks.",
        ]
    lines += [
        "",
        "examples:",
        *(f"  {example}" for example in command.examples),
    ]
    return "\n".join(lines)


def _ordered(command: Command) -> list[tuple[str, Any]]:
    """Sort the keys: the command's own first, then section by section."""
    by_itself = command.config.INSTEAD if issubclass(command.config, EngineConfig) else {}
    keys = [(key, hint) for key, hint in dotted_keys(command.config) if key not in by_itself]
    order = ["", "search", "sampling", "workload", "slo", "simulation", "hardware", "parallel", "scheduler", "cache",
             "model"]  # fmt: skip
    return sorted(keys, key=lambda item: order.index(item[0].partition(".")[0] if "." in item[0] else ""))


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _entry(head: str, text: str, column: int) -> str:
    """Put `text` beside `head` from `column` on, or below it where the head is longer."""
    wrapped = textwrap.wrap(text, WIDTH - column, break_on_hyphens=False)
    if len(head) >= column:
        return "\n".join([head, *(" " * column + line for line in wrapped)])
    return "\n".join([head.ljust(column) + wrapped[0], *(" " * column + line for line in wrapped[1:])])
