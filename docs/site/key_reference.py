"""Pages of every command, group and key, with defaults, types and meanings, as the commands' `--help` knows them."""

from __future__ import annotations

import re
from collections.abc import Iterable

import yaml

from gapless.conf.build import GROUPS, describe, group_names, load_group
from gapless.conf.meanings import meanings
from gapless.launch.commands import COMMANDS, Command
from gapless.launch.help import defaults_of, sections
from gapless.launch.options import options_of
from gapless.launch.overrides import value_text

from .staging import ROOT

FOLDER = "reference/keys"
GROUPS_PAGE = f"{FOLDER}/groups.md"
_ANCHOR = str.maketrans("._", "--")  # of a key: serve.api_keys is #serve-api-keys


def key_pages() -> dict[str, str]:
    """Return the pages, by path in the site: one that leads to the others, one for each command, one of all groups."""
    commands = {f"{FOLDER}/{command.name}.md": command_page(command) for command in COMMANDS.values()}
    names = [path.removeprefix("reference/") for path in (*commands, GROUPS_PAGE)]
    rows = [(f"[`gapless {command.name}`](keys/{command.name}.md)", command.summary) for command in COMMANDS.values()]
    rows.append(("[groups](keys/groups.md)", "every choice of every group, and what it sets"))
    index = [
        "# Commands and keys",
        "",
        "Made of the code when the site is built; `gapless COMMAND --help` prints the same.",
        "",
        *_table(("page", "what it is of"), ((name, _text(summary)) for name, summary in rows)),
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *names,
        "```",
        "",
    ]
    return {"reference/keys.md": "\n".join(index), **commands, GROUPS_PAGE: groups_page()}


def command_page(command: Command) -> str:
    """Return the page of a command: how it is called, its groups, its options, and its keys by section."""
    defaults, chosen = defaults_of(command)
    meaning = meanings(command.config)
    usage = "FOLDER ... [KEY=VALUE ...]" if command.positional else "[-m] [GROUP=CHOICE ...] [KEY=VALUE ...]"
    lines = [f"# gapless {command.name}", "", f"{_text(command.summary)}.", ""]
    lines += ["```text", f"gapless {command.name} {usage}", "```", "", "```sh", *command.examples, "```", ""]
    if chosen:
        rows = (
            (f"`{group}={value_text(choice)}`", _text(GROUPS[group]), f"[choices](groups.md#{group})")
            for group, choice in chosen.items()
        )
        lines += ["## Groups", "", *_table(("group and its default", "meaning", ""), rows), ""]
    for heading, keys in sections(command):
        rows = (
            (
                f"[`{key}`]{{#{key.translate(_ANCHOR)}}}",
                f"`{value_text(defaults[key])}`" if key in defaults else "",
                f"{_text(meaning[key])} ({_text(describe(hint))})",
            )
            for key, hint in keys
        )
        lines += [f"## Keys: {heading}", "", *_table(("key", "default", "meaning and type"), rows), ""]
    rows = ((f"`{option.usage}`", _text(option.meaning)) for option in options_of(command))
    lines += ["## Options", "", *_table(("option", "meaning"), rows), ""]
    return "\n".join(lines)


def groups_page() -> str:
    """Return the page of every group with its choices, each as its file says, or, where it has none, with its keys."""
    lines = ["# Groups and their choices", ""]
    for group, meaning in GROUPS.items():
        lines += [f"## {group}", "", f"`{group}=CHOICE`: {_text(meaning)}.", ""]
        for name in group_names(group):
            file = ROOT / "conf" / group / f"{name}.yaml"
            text = file.read_text(encoding="utf-8") if file.is_file() else yaml.safe_dump(load_group(group, name))
            lines += [f"### {name}", "", "```yaml", text.rstrip(), "```", ""]
    return "\n".join(lines)


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    return [_row(heads), _row("---" for _ in heads), *map(_row, rows)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _text(words: str) -> str:
    """Return the words of a docstring or a help text, with what Markdown would take for markup as it stands."""
    parts = re.split(r"(`[^`]*`)", words)
    parts[::2] = [re.sub(r"([*_<>\[\]$#])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
