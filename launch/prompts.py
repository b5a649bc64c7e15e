"""Reads prompts from an override, a text or JSONL file, the package, or standard input."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import logging
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib import resources
from typing import Any, BinaryIO

from ..conf.build import build, is_unicode, to_mapping
from ..conf.errors import ConfigError, nearest, reason
from ..conf.row_files import first_row, json_rows, open_rows
from ..conf.sampling import SamplingParams
from ..conf.schema import GenerateConfig
from ..conf.structured_outputs import whole_numbers
from ..conf.user_path import user_path
from ..models.chat_template import Conversation, checked_messages

_log = logging.getLogger(__name__)
_CONTENTS = ("prompt", "messages", "prompt_token_ids")
_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))
_CSV_HEADER = re.compile(r'(?:["\w]+[,;\t])*"?(?:prompts?|messages)"?(?:[,;\t]["\w]+)*', re.IGNORECASE)
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_LONGEST_LINE = 16 << 20  # bytes; a context of a million tokens takes about 4 MiB of text, or 8 MiB of token ids


class StandardInput:
    """Standard input, read once for all runs of a sweep."""

    @property
    def is_terminal(self) -> bool:
        """Whether standard input is a terminal or closed, so that it has no data."""
        return sys.stdin is None or sys.stdin.closed or sys.stdin.isatty()

    @cached_property
    def data(self) -> bytes:
        """The contents of standard input, read on first use."""
        return sys.stdin.buffer.read()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text, token ids or chat messages (the others are None)."""

    text: str | None
    token_ids: tuple[int, ...] | None
    params: SamplingParams
    messages: tuple[dict[str, Any], ...] | None = None

    def as_chat(self) -> Prompt:
        """Return the prompt with its text, if any, as a user message."""
        if self.text is None:
            return self
        return dataclasses.replace(self, text=None, messages=({"role": "user", "content": self.text},))

    @property
    def content(self) -> str | list[int] | Conversation:
        """The prompt as input of `LLM`."""
        if self.messages is not None:
            return Conversation(self.messages)
        return list(self.token_ids) if self.token_ids is not None else self.text or ""

    @property
    def shown(self) -> str:
        """The prompt for display: the text, the last message, or the number of token ids."""
        if self.messages is not None:
            return str(self.messages[-1]["content"])
        return self.text if self.text is not None else f"[{len(self.token_ids or ())} token ids] "


def read_prompts(config: GenerateConfig, stdin: StandardInput) -> list[Prompt]:
    """Read at least one prompt from the source in `config`.

    Raises:
        ConfigError: no source or two, an unreadable file, an invalid line (with its number), or no prompts.
    """
    if config.prompt is not None and config.prompts is not None:
        raise ConfigError("prompt and prompts are both given; give one of them")
    if config.prompt is not None:
        if not config.prompt:
            raise ConfigError("prompt='': must not be empty")
        return [Prompt(config.prompt, None, config.sampling)]
    if config.prompts is None:
        if stdin.is_terminal:
            raise ConfigError(
                'no prompts; give prompt="...", prompts=FILE, prompts=questions, or pipe one prompt per line'
            )
        source = "standard input"
        found = _read(io.BytesIO(stdin.data), source, config.sampling)
    elif config.prompts in ("shipped", "questions"):
        source = f"{config.prompts}_prompts.jsonl"
        data = resources.files("gapless.conf").joinpath(source).read_bytes()
        found = _read(io.BytesIO(data), source, config.sampling)
    else:
        source = config.prompts
        path = user_path(source, "prompts")
        with open_rows(path, "prompts", "redirect it to standard input and remove prompts") as file:
            found = _read(file, source, config.sampling, is_json=path.suffix.lower() in _JSON_SUFFIXES)
    if not found:
        raise ConfigError(f"{source}: has no prompts")
    defaults = to_mapping(SamplingParams())
    of_rows = [to_mapping(params) for params in dict.fromkeys(prompt.params for prompt in found)]
    for name, value in to_mapping(config.sampling).items():
        if value != defaults[name] and all(row[name] != value for row in of_rows):
            _log.warning("sampling.%s=%s: overridden by every row of %s", name, value, source)
    return found


def _read(file: BinaryIO, source: str, params: SamplingParams, is_json: bool = False) -> list[Prompt]:
    """Read prompts as JSON, if `is_json` or the first row is a JSON prompt, else as lines of text."""
    try:
        first, number, lines = first_row(_read_lines(file, source))
        if is_json or _is_json(first):
            return list(_json_prompts(json_rows(lines, source, number), params, source))
        if _CSV_HEADER.fullmatch(first.strip()):
            raise ConfigError(f"{source}:{number}: looks like a CSV header; give one prompt per line, as text or JSON")
        return [Prompt(line.removesuffix("\r"), None, params) for line in lines if line.strip()]
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{source}: unreadable, or a damaged .gz ({reason(error)})") from None


def _is_json(line: str) -> bool:
    """Return whether a line starts a JSON array or object, or is an object with one of our keys."""
    text = line.strip()
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return text in ("[", "{") or (text.startswith(('["', "[{")) and text.endswith(","))
    if isinstance(row, list):
        return bool(row) and all(isinstance(each, (str, dict)) for each in row)
    return isinstance(row, dict) and not row.keys().isdisjoint((*_CONTENTS, "body"))


def _read_lines(file: BinaryIO, source: str) -> Iterator[str]:
    """Yield the lines of a file without line ends.

    Raises:
        ConfigError: a line is too long or not UTF-8; the message has its number.
    """
    for number in itertools.count(1):
        line = file.readline(_LONGEST_LINE + 1)
        if not line:
            return
        if len(line) > _LONGEST_LINE:
            longest = f"{_LONGEST_LINE >> 20} MiB"
            raise ConfigError(f"{source}:{number}: longer than {longest}, the limit for one prompt")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{source}:{number}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _json_prompts(rows: Iterator[tuple[int, Any]], params: SamplingParams, source: str) -> Iterator[Prompt]:
    for number, row in rows:
        try:
            yield _row({"prompt": row} if isinstance(row, str) else row, params)
        except ConfigError as error:
            raise ConfigError(f"{source}:{number}: {error}") from None


def _row(row: Any, params: SamplingParams) -> Prompt:
    """Parse one JSON object."""
    if not isinstance(row, dict):
        raise ConfigError('must be an object such as {"prompt": "..."}')
    if "body" in row:
        text = "a request of an OpenAI batch file; give its messages or prompt and its sampling values as a row"
        raise ConfigError(f"{text}, or send its body to gapless serve")
    if row and row.keys().isdisjoint(_CONTENTS) and not any(get_close_matches(key, _CONTENTS) for key in row):
        of = " (use workload=sharegpt for ShareGPT files)" if "conversations" in row else ""
        raise ConfigError(f"give one of prompt, messages and prompt_token_ids; found {', '.join(row)[:80]}{of}")
    row = {key: _plain(key, value) for key, value in row.items() if value is not None}
    for key in row:
        if key not in (*_CONTENTS, *_SAMPLING):
            raise ConfigError(f"{key}: unknown key{nearest(key, (*_CONTENTS, *_SAMPLING))}")
    text, messages, ids = (row.pop(name, None) for name in _CONTENTS)
    if [text, messages, ids].count(None) != 2:
        raise ConfigError("give one of prompt, messages and prompt_token_ids")
    if text is not None and (not isinstance(text, str) or not text):
        raise ConfigError(f"prompt={text!r}: must be a non-empty string")
    if text is not None and not is_unicode(text):
        raise ConfigError("prompt: has an unpaired surrogate (\\ud800 .. \\udfff), which is not valid Unicode")
    if ids is not None and not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
        raise ConfigError("prompt_token_ids: must be a non-empty list of token ids")
    own = build(SamplingParams, to_mapping(params) | row, "sampling") if row else params
    return Prompt(
        text,
        None if ids is None else tuple(ids),
        own,
        None if messages is None else tuple(checked_messages(messages)),
    )


def _plain(key: str, value: Any) -> Any:
    """Return a row's value with integral floats as integers, except in messages, and null for a seed of -1."""
    if key == "messages":
        return value
    return None if key == "seed" and value == -1 else whole_numbers(value)
