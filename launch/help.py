"""The texts of `gapless --help` and `gapless COMMAND --help`: every key with its default, type and meaning.

They are as wide as the terminal, and at most `WIDEST`.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..conf.build import GROUPS, describe, dotted_keys, group_names, leaves, load_command, load_group, value_text
from ..conf.meanings import meanings
from ..conf.schema import EngineConfig
from ..models.gguf.smollm2 import INSTALL
from .options import OPTIONS

if TYPE_CHECKING:
    from .commands import Command

NARROWEST, WIDEST = 50, 118
FIRST_KEYS = (  # of each command those that it has, before all others
    *("prompt", "prompts", "outputs", "serve.port", "serve.host", "serve.api_keys", "serve.model_name"),
    *("sampling.max_tokens", "sampling.temperature", "nodes", "slo.ttft_ms", "slo.tbt_ms"),
    *("workload.num_prompts", "workload.request_rate", "parallel.tp", "parallel.pp"),
    *("scheduler.chunk", "scheduler.batch", "simulation.replicas", "runs", "figures", "out"),
)
_SECTIONS = (
    *("", "serve", "search", "sampling", "workload", "slo", "simulation"),
    *("parallel", "scheduler", "cache", "model", "hardware", "cluster"),
)
_COSTS = "hardware.costs"


def width() -> int:
    """Return the columns of the terminal, or of COLUMNS; where there is neither, as in a pipe, `WIDEST`."""
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size((WIDEST + 1, 24)).columns - 1))


def overview(commands: Iterable[Command]) -> str:
    """Write the text of `gapless --help`."""
    commands = list(commands)
    listed = "\n".join(_entry(f"  {c.name}", c.summary, 12) for c in commands)
    options = "\n".join(_entry(f"  {option.usage}", option.meaning, 20) for option in OPTIONS)
    examples = "\n".join(_command_line(example) for c in commands for example in c.examples)
    answers = f"A model that answers, for gapless chat and model=smollm2: {INSTALL} (93 MB)."
    about = "gapless serves large language models over pipeline and tensor parallelism without gaps in the pipeline "
    return f"""\
{textwrap.fill(about + "(SARATHI).", width())}

{_usage("gapless COMMAND [-m] [GROUP=CHOICE ...] [KEY=VALUE ...]")}
       gapless report FOLDER ... [KEY=VALUE ...]
       gapless explain FOLDER [KEY=VALUE ...]

commands:
{listed}

options:
{options}

examples:
{examples}

{textwrap.fill(answers, width())}"""


def command(command: Command) -> str:
    """Write the text of `gapless COMMAND --help`."""
    defaults, chosen = defaults_of(command)
    usage = "FOLDER ... [KEY=VALUE ...]" if command.positional else "[-m] [GROUP=CHOICE ...] [KEY=VALUE ...]"
    usage = usage.replace(" ...", "", 1) if command.others else usage
    lines = [*_wrapped(f"gapless {command.name}: {command.summary}"), "", _usage(f"gapless {command.name} {usage}"), ""]
    if chosen:
        lines.append("groups (GROUP=CHOICE):")
    for group, choice in chosen.items():
        choices = "choices: " + ", ".join(group_names(group))
        lines += [_entry(f"  {group}={value_text(choice)}", GROUPS[group], 28), *_wrapped(choices, " " * _column(28))]
    if "policies" in defaults:
        how = "by turns on one started pipeline" if command.has_ranks else "one after the other"
        lines += _wrapped(
            f"scheduler=NAME,NAME without -m runs each policy {how}, over the same requests; a key of "
            "scheduler then applies to those that have it.",
            "  ",
        )
    lines += ["", "keys (KEY=VALUE), with the defaults of the groups above:" if chosen else "keys (KEY=VALUE):"]
    meaning = meanings(command.config)
    for heading, keys in sections(command):
        lines += ["", *_wrapped(f"{heading}:")]
        for key, hint in keys:
            default = f"={value_text(defaults[key])}" if key in defaults else ""
            lines.append(_entry(f"  {key}{default}", f"{meaning[key]} ({describe(hint)})", 44))
    if not command.positional:
        folder = f"The run folder is {command.folder}; hydra.run.dir=FOLDER names another."
        lines += [
            "",
            *_wrapped('Texts and paths need no quotes of their own within the shell\'s: prompt="Hello, world (=x)".'),
            *_wrapped(f"{folder} HYDRA_FULL_ERROR=1 shows tracebacks."),
        ]
    return "\n".join([*lines, "", "examples:", *map(_command_line, command.examples)])


def defaults_of(command: Command) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return the defaults of a command: of its keys with those of the groups that it chooses, and these choices."""
    own, chosen = load_command(command.name)
    defaults = dict(leaves(own))
    for group, choice in chosen.items():
        if choice is not None:
            defaults |= {f"{group}.{key}": value for key, value in leaves(load_group(group, choice))}
    return defaults, chosen


def sections(command: Command) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Put the keys under headings: those used most, the command's own, those of each group, constants of the device."""
    by_itself = command.config.INSTEAD if issubclass(command.config, EngineConfig) else {}
    keys = [(key, hint) for key, hint in dotted_keys(command.config) if key not in by_itself]
    first = sorted((key for key in keys if key[0] in FIRST_KEYS), key=lambda key: FIRST_KEYS.index(key[0]))
    found: dict[str, list[tuple[str, Any]]] = {"used most": first}
    for section in _SECTIONS:
        own = [(key, hint) for key, hint in keys if key.rpartition(".")[0].partition(".")[0] == section]
        name = section or "the command's own"
        found[name] = [k for k in own if k not in first and not k[0].startswith(_COSTS)]
    found[f"{_COSTS}: what the analytic cost model knows of the device"] = [k for k in keys if k[0].startswith(_COSTS)]
    assert sum(map(len, found.values())) == len(keys), "each key is in one section"
    return [(heading, own) for heading, own in found.items() if own]


def _column(column: int) -> int:
    """Return where texts begin beside their heads: `column`, or earlier on a narrow terminal."""
    return min(column, width() * 3 // 8)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _usage(usage: str) -> str:
    """Return how a command is called; a key and its value stay on one line."""
    whole = usage.replace(" ...]", "\0...]")
    lines = textwrap.wrap(f"usage: {whole}", width(), subsequent_indent=" " * 7, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def _entry(head: str, text: str, column: int) -> str:
    """Put `text` beside `head` from `column` on, or below it where the head is longer."""
    key, _, default = head.partition("=")
    if len(head) > width():  # a long list: it goes below its key, broken between its entries
        head, text = key, f"default {default.replace(',', ', ')}: {text}"
    column = _column(column)
    wrapped = _wrapped(text, " " * column)
    if len(head) >= column:
        return "\n".join([head, *wrapped])
    return "\n".join([head + wrapped[0][len(head) :], *wrapped[1:]])


def _command_line(command: str) -> str:
    """Return a command as one can copy it: longer than the terminal, it goes on behind backslashes."""
    lines = ["  "]
    words: list[str] = []
    for word in command.split(" "):  # a word with an open quote goes on
        if words and (words[-1].count('"') % 2 or words[-1].count("'") % 2):
            words[-1] += f" {word}"
        else:
            words.append(word)
    for word in words:
        if lines[-1].strip() and len(lines[-1]) + len(word) + 3 > width() and len("  " + command) > width():
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += f"{word} "
    return "\n".join(line.rstrip(" ") for line in lines)
