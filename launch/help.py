"""Help texts. `gapless COMMAND --help` has the most important keys, one line each.

`--help all` has all keys with defaults, types and full meanings; `--help WORD` has the keys that match a word. Lines
are as wide as the terminal, up to `WIDEST`.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..conf import build
from ..conf.build import GROUPS, describe, dotted_keys, group_names, leaves, load_command, load_group, value_text
from ..conf.errors import ConfigError
from ..conf.meanings import meanings
from ..conf.schema import EngineConfig
from ..conf.units import unit_of
from ..models.gguf.smollm2 import INSTALL
from .options import OPTIONS
from .serve_arguments import with_default_model

if TYPE_CHECKING:
    from .commands import Command

NARROWEST, WIDEST = 50, 118
FIRST_KEYS = (  # shown first, if the command has them
    *("prompt", "prompts", "outputs", "serve.port", "serve.host", "serve.api_keys", "serve.model_name"),
    *("sampling.max_tokens", "sampling.temperature", "nodes", "slo.ttft_ms", "slo.tbt_ms"),
    *("workload.num_prompts", "workload.request_rate", "parallel.tp", "parallel.pp"),
    *("scheduler.chunk", "scheduler.batch", "simulation.replicas", "runs", "figures", "out"),
)
_MATTER = frozenset(  # also in the short help, if the command has them
    [
        *("seed", "chat", "system", "policies", "repeats", "interleave", "url", "seeds", "precision"),
        *("samples", "max_tokens", "max_context", "max_decodes", "num_layers", "neighbours", "pipeline", "check"),
        *(f"serve.{name}" for name in ("config", "replicas", "max_waiting", "timeout_s", "drain_s", "journal")),
        *(f"serve.{name}" for name in ("log_level", "log_format", "otlp_endpoint", "tokens_per_minute")),
        *(f"serve.{name}" for name in ("requests_per_minute", "ssl_keyfile", "ssl_certfile", "allowed_origins")),
        *(f"sampling.{name}" for name in ("n", "top_p", "top_k", "seed", "stop", "logprobs")),
        *(f"workload.{name}" for name in ("input_len", "output_len", "max_len", "max_concurrency", "path")),
        *(f"search.{name}" for name in ("tp", "pp", "chunk", "depth", "exhaustive")),
        *(f"slo.{name}" for name in ("ttft_p99_ms", "tbt_p99_ms")),
        *(f"simulation.{name}" for name in ("cost", "profile", "router")),
        *(f"parallel.{name}" for name in ("layers", "depth", "launcher", "threads", "ray_address", "spares")),
        *(f"scheduler.{name}" for name in ("order", "drafts")),
        *(f"cache.{name}" for name in ("block_size", "num_blocks", "prefix_caching")),
        *(f"model.{name}" for name in ("dtype", "quantization", "max_model_len", "tokenizer")),
        "hardware.memory_gib",
    ]
)
_SECTIONS = (
    *("", "serve", "search", "sampling", "workload", "slo", "simulation"),
    *("parallel", "scheduler", "cache", "model", "hardware", "cluster"),
)
_COSTS = "hardware.costs"


def width() -> int:
    """Return the width of the terminal or COLUMNS; without either, as in a pipe, `WIDEST`."""
    return min(WIDEST, max(NARROWEST, shutil.get_terminal_size((WIDEST + 1, 24)).columns - 1))


def overview(commands: Iterable[Command]) -> str:
    """Return the text of `gapless --help`."""
    commands = list(commands)
    listed = "\n".join(_entry(f"  {c.name}", c.summary, 12) for c in commands)
    options = "\n".join(_entry(f"  {option.usage}", option.meaning, 20) for option in OPTIONS)
    examples = "\n".join(_command_line(example) for c in commands for example in c.examples)
    answers = f"The chat model of gapless chat and model=smollm2: {INSTALL} (93 MB)."
    about = "gapless serves large language models with pipeline and tensor parallelism, without pipeline bubbles "
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


def command(command: Command, asked: str = "") -> str:
    """Return the text of `gapless COMMAND --help`: short, of `all` keys, or of keys that match the word `asked`.

    Raises:
        ConfigError: no key, group or choice matches.
    """
    if asked not in ("", "all"):
        return _search(command, asked)
    return _whole(command) if asked or command.positional else _short(command)


def _short(command: Command) -> str:
    """Return one line per important key."""
    defaults, chosen = defaults_of(command)
    if command.takes_vllm_options:
        chosen = {**chosen, **dict(text.split("=") for text in with_default_model(()))}
    meaning = meanings(command.config)
    vllm = "MODEL and vLLM's options work too (docs/from_vllm.md)"
    rest = f"--help all lists all keys, --help WORD those that match a word: gapless {command.name} --help cache"
    lines = [*_wrapped(f"gapless {command.name}: {command.summary}"), "", _usage(_called(command))]
    lines += ["", "groups of keys (GROUP=CHOICE):"]
    lines += [_line(f"  {group}={value_text(choice)}", GROUPS[group]) for group, choice in chosen.items()]
    for heading, keys in sections(command):
        shown = [key for key, _ in keys if key in _MATTER or key in FIRST_KEYS]
        lines += ["", f"{heading}:"] if shown else []
        lines += [_line(_head(key, defaults), meaning[key]) for key in shown]
    more = [*(_wrapped(vllm) if command.takes_vllm_options else ()), *_wrapped(rest)]
    return "\n".join([*lines, "", *more, "", "examples:", *map(_command_line, command.examples[:2])])


def _search(command: Command, word: str) -> str:
    """Return the groups and keys whose name, choices or meaning match a word."""
    defaults, chosen = defaults_of(command)
    meaning = meanings(command.config)
    wanted = word.lower().replace("-", "_")
    lines: list[str] = []
    for group, choice in chosen.items():
        if wanted in f"{group} {GROUPS[group]} {' '.join(group_names(group))}".lower():
            lines += _group(group, choice)
    for _, keys in sections(command):
        for key, hint in keys:
            if wanted in key or re.search(rf"\b{re.escape(word)}", meaning[key], re.IGNORECASE):
                lines.append(_key(key, hint, meaning[key], defaults))
    if not lines:
        raise ConfigError(f"--help {word}: no match in keys, groups or choices of {command.name}; try --help all")
    return "\n".join(lines)


def _called(command: Command) -> str:
    """Return the usage of a command."""
    if command.positional:
        folders = "FOLDER" if command.others else "FOLDER ..."
        return f"gapless {command.name} {folders} [KEY=VALUE ...]"
    model = " [MODEL]" if command.takes_vllm_options else ""
    return f"gapless {command.name}{model} [-m] [GROUP=CHOICE ...] [KEY=VALUE ...]"


def _whole(command: Command) -> str:
    """Return all keys with their defaults, types and meanings."""
    defaults, chosen = defaults_of(command)
    lines = [*_wrapped(f"gapless {command.name}: {command.summary}"), "", _usage(_called(command)), ""]
    if chosen:
        lines.append("groups (GROUP=CHOICE):")
    for group, choice in chosen.items():
        lines += _group(group, choice)
    if "policies" in defaults:
        how = "in turn on one pipeline" if command.has_ranks else "one after the other"
        lines += _wrapped(
            f"scheduler=NAME,NAME without -m runs each policy {how}, with the same requests; a scheduler "
            "key then applies to the policies that have it.",
            "  ",
        )
    lines += ["", "keys (KEY=VALUE), with the defaults of these groups:" if chosen else "keys (KEY=VALUE):"]
    meaning = meanings(command.config)
    for heading, keys in sections(command):
        lines += ["", *_wrapped(f"{heading}:")]
        lines += [_key(key, hint, meaning[key], defaults) for key, hint in keys]
    if not command.positional:
        folder = f"The run folder is {command.folder}; set another by hydra.run.dir=FOLDER."
        lines += [
            "",
            *_wrapped('Texts and paths need only the shell\'s quotes: prompt="Hello, world (=x)".'),
            *_wrapped(f"{folder} HYDRA_FULL_ERROR=1 shows tracebacks."),
        ]
    return "\n".join([*lines, "", "examples:", *map(_command_line, command.examples)])


def defaults_of(command: Command) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return the default value of each key, those of config groups included, and the default choice of each group."""
    own, chosen = load_command(command.name)
    defaults = dict(leaves(build.defaults(command.config))) | dict(leaves(own))
    for group, choice in chosen.items():
        if choice is not None:
            defaults |= {f"{group}.{key}": value for key, value in leaves(load_group(group, choice))}
    return defaults, chosen


def sections(command: Command) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return the keys by heading: most used, the command's own, one per group, device constants."""
    by_itself = command.config.INSTEAD if issubclass(command.config, EngineConfig) else {}
    keys = [(key, hint) for key, hint in dotted_keys(command.config) if key not in by_itself]
    first = sorted((key for key in keys if key[0] in FIRST_KEYS), key=lambda key: FIRST_KEYS.index(key[0]))
    found: dict[str, list[tuple[str, Any]]] = {"most used": first}
    for section in _SECTIONS:
        own = [(key, hint) for key, hint in keys if key.rpartition(".")[0].partition(".")[0] == section]
        name = section or "command-specific"
        found[name] = [k for k in own if k not in first and not k[0].startswith(_COSTS)]
    found[f"{_COSTS}: device constants of the analytic cost model"] = [k for k in keys if k[0].startswith(_COSTS)]
    assert sum(map(len, found.values())) == len(keys), "each key is in one section"
    return [(heading, own) for heading, own in found.items() if own]


def _head(key: str, defaults: dict[str, Any]) -> str:
    return f"  {key}={value_text(defaults[key])}" if key in defaults else f"  {key}"


def _key(key: str, hint: Any, meaning: str, defaults: dict[str, Any]) -> str:
    unit = unit_of(key)
    kind = f"{describe(hint)}, in {unit}" if unit and "number" in describe(hint) else describe(hint)
    return _entry(_head(key, defaults), f"{meaning} ({kind})", 44)


def _group(group: str, choice: str | None) -> list[str]:
    choices = "choices: " + ", ".join(group_names(group))
    return [_entry(f"  {group}={value_text(choice)}", GROUPS[group], 28), *_wrapped(choices, " " * _column(28))]


def _line(head: str, text: str) -> str:
    """Return `head` and the start of `text` in one line."""
    column = max(_column(34), len(head) + 2)
    room = width() - column
    first = text.partition("; ")[0]
    shown = first if len(first) <= room else textwrap.shorten(text, room, placeholder=" ...")
    return f"{head:{column}}{shown}".rstrip()[: width()]


def _column(column: int) -> int:
    """Return the column of texts: `column`, or less on a narrow terminal."""
    return min(column, width() * 3 // 8)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _usage(usage: str) -> str:
    """Return a wrapped usage line, without breaks between a key and its value."""
    whole = usage.replace(" ...]", "\0...]")
    lines = textwrap.wrap(f"usage: {whole}", width(), subsequent_indent=" " * 7, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def _entry(head: str, text: str, column: int) -> str:
    """Return `head` with `text` from `column` on, or below it if the head is longer."""
    key, _, default = head.partition("=")
    if len(head) > width():  # a long list goes below its key, wrapped between entries
        head, text = key, f"default {default.replace(',', ', ')}: {text}"
    column = _column(column)
    wrapped = _wrapped(text, " " * column)
    if len(head) >= column:
        return "\n".join([head, *wrapped])
    return "\n".join([head + wrapped[0][len(head) :], *wrapped[1:]])


def _command_line(command: str) -> str:
    """Return a copyable command; if longer than the terminal, it is continued with backslashes."""
    lines = ["  "]
    words: list[str] = []
    for word in command.split(" "):  # an open quote continues the word
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
