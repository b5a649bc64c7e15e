"""The chat template of a checkpoint: jinja, in a sandbox, as `transformers` renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from ..conf import strict_json
from ..conf.build import is_unicode
from ..conf.errors import ConfigError
from .gguf.file import open_gguf
from .gguf.tokenizer import special_tokens


class ChatTemplateError(ValueError):
    """The template refuses these messages, or fails on them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, each with a `role` and a `content`, of which the model's chat template makes a prompt."""

    messages: Sequence[Mapping[str, Any]]


class ChatTemplate:
    """Renders messages to a prompt.

    Args:
        source: jinja.
        variables: further names that the template knows, as `bos_token`.
    """

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        self._source = source
        self._variables = variables

    @cached_property
    def _template(self) -> Any:
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self._source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is not jinja: {error}") from error

    def check(self) -> None:
        """Raise `ConfigError` if the template is not jinja."""
        _ = self._template

    def render(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, further: dict[str, Any] | None = None
    ) -> str:
        """Return the prompt of a chat.

        Args:
            messages: of the chat, in order.
            add_generation_prompt: whether the prompt ends where the assistant's answer begins.
            further: names that this request sets (`chat_template_kwargs`).

        Raises:
            ChatTemplateError: the template refuses the messages.
        """
        from jinja2 import TemplateError

        names = self._variables | {"tools": None, "documents": None} | (further or {})
        names |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return str(self._template.render(names))
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ChatTemplateError(f"the model's chat template: {error}") from error


def load_chat_template(tokenizer: str | None) -> ChatTemplate | None:
    """Load the chat template beside a tokenizer; None where it has none.

    Raises:
        ConfigError: a file that cannot be read, or is not jinja.
    """
    if tokenizer in (None, "none"):
        return None
    path = Path(tokenizer)
    source, tokens = _read_gguf(path) if path.suffix == ".gguf" else _read_folder(path)
    if source is None:
        return None
    template = ChatTemplate(source, tokens)
    template.check()
    return template


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation as chat templates read them: with a content that is one text.

    Raises:
        ConfigError: they are no list of objects with a `role` and a `content`, a text or a list of text parts.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ConfigError('messages: must be a list such as [{"role": "user", "content": "..."}]')
    return [_checked_message(number, message) for number, message in enumerate(messages)]


def _checked_message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(f"messages[{number}]: must be an object with a role, such as user, and a content")
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise ConfigError(f"messages[{number}].content: must be a text, or a list of parts of type text")
    texts = [part.get("text") for part in parts]
    if not all(isinstance(text, str) and is_unicode(text) for text in texts):
        raise ConfigError(f"messages[{number}].content: each part must have a text, in whole Unicode characters")
    return {**message, "content": "".join(texts)}


def _read_gguf(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the template of a GGUF file and its special tokens."""
    file = open_gguf(path)
    source = file.get("tokenizer.chat_template")
    return (source, special_tokens(file)) if isinstance(source, str) else (None, {})


def _read_folder(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the template in a tokenizer's folder and its special tokens."""
    folder = path if path.is_dir() else path.parent
    config = _read(folder / "tokenizer_config.json")
    if (source := _source(folder, config)) is None:
        return None, {}
    special = _read(folder / "special_tokens_map.json") | config
    return source, {name: _content(value) for name, value in special.items() if name.endswith("_token")}


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if found is None:
        found = _read(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = strict_json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Return JSON without jinja's escapes for HTML, as `transformers` has it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
