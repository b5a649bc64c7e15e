"""The chat template of a checkpoint: sandboxed Jinja, rendered like in `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn

from ..conf.build import is_unicode
from ..conf.errors import ConfigError, reason
from ..conf.user_path import user_path
from .gguf.file import open_gguf
from .gguf.tokenizer import special_tokens
from .json_file import read_if_there
from .limited_process import LimitedProcess, LimitError

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}  # the key of each type
_REASONING = ("reasoning_content", "thinking", "reasoning")  # accepted keys; templates read the first or the second
_DEFAULT = "default"  # name of the default template
_CLASS_TOKENS = {  # bos, eos, unk and pad of tokenizer classes in `transformers` 5.23, unless a file names them
    "GPT2Tokenizer": (*["<|endoftext|>"] * 3, None),
    "GPTNeoXTokenizer": (*["<|endoftext|>"] * 3, "<|padding|>"),
    "Qwen2Tokenizer": (None, *["<|endoftext|>"] * 3),
    "Qwen3_5Tokenizer": (None, *["<|endoftext|>"] * 3),
    "LlamaTokenizer": ("<s>", "</s>", "<unk>", None),
    "CodeLlamaTokenizer": ("<s>", "</s>", "<unk>", None),
    "GemmaTokenizer": ("<bos>", "<eos>", "<unk>", "<pad>"),
    "CohereTokenizer": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<UNK>", "<PAD>"),
}
_CALLS = (  # keys of function calls and of `custom` tool calls
    ("function", "arguments", "the text of a JSON object"),
    ("custom", "input", "a text"),
)
LONGEST_S = 2.0  # of processor time, to compile a template or to render a chat
_PROCESS = LimitedProcess(1 << 29)
_END = "END_OF_THE_FINAL_MESSAGE "  # marks its end in the rendered prompt


class ChatTemplateError(ValueError):
    """The template rejects these messages, or fails on them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, each with a `role` and a `content`, that the chat template renders to a prompt."""

    messages: Sequence[Mapping[str, Any]]


class ChatTemplate:
    """Renders messages to a prompt.

    Args:
        source: Jinja source, kept as an attribute.
        variables: additional template variables, such as `bos_token`.
        named: sources of the checkpoint's named templates, such as `tool_use` and `rag`.
    """

    def __init__(self, source: str, variables: dict[str, Any], named: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._variables = variables
        self.named = {name: ChatTemplate(text, variables) for name, text in (named or {}).items()}

    def pick(self, has_tools: bool, name: str | None = None) -> ChatTemplate:
        """Return the template called `name`. Without a name, `tool_use` if the chat has tools, else the default.

        Raises:
            ChatTemplateError: the checkpoint has no template of this name.
        """
        if name is None:
            return self.named.get("tool_use", self) if has_tools else self
        if name not in self.named and name != _DEFAULT:
            known = ", ".join((_DEFAULT, *self.named))
            raise ChatTemplateError(
                f"chat_template: must be the name of one of the checkpoint's ({known}); templates in "
                "requests are not accepted, because they can run code"
            )
        return self.named.get(name, self)

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template renders tools.

        Raises:
            ChatTemplateError: it does not compile within the limits.
        """
        return bool(self._run(partial(_reads_tools, self.source)))

    def check(self) -> None:
        """Raise `ConfigError` if the template is not valid Jinja, or does not compile within the limits."""
        for each in (self, *self.named.values()):
            try:
                _ = each.reads_tools
            except ChatTemplateError as error:
                raise ConfigError(str(error)) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        further: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt of a chat, like `apply_chat_template` of `transformers`.

        Rendered in a separate process, since a template is untrusted code that may loop forever.

        Args:
            messages: the chat's messages, in order.
            add_generation_prompt: append the start of the assistant's answer.
            further: variables set by this request (`chat_template_kwargs`).
            continue_final_message: leave the last message open, for the model to continue.

        Raises:
            ChatTemplateError: the template rejects the messages or exceeds a limit, or no message can be continued.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message: not together with add_generation_prompt")
        names = self._variables | {"tools": None, "documents": None} | dict(further or {})
        names |= {"add_generation_prompt": add_generation_prompt}
        text = self._run(partial(_render, self.source, names, messages, _END if continue_final_message else ""))
        assert isinstance(text, str)
        if not continue_final_message:
            return text
        before, found, after = text.rpartition(_END.strip())
        if not found:
            raise ChatTemplateError("continue_final_message: the model's chat template drops the last message's end")
        return before if after.startswith(" ") else before.rstrip()  # otherwise the template trims messages

    def _run(self, task: Callable[[], object]) -> object:
        try:
            return _PROCESS.run(task, LONGEST_S)
        except LimitError as error:
            raise ChatTemplateError(f"the model's chat template: not done within {error}") from error


def _render(source: str, names: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], end: str) -> str:
    """Render `messages` with the variables `names`. `end` is appended to the text of the last message."""
    from jinja2 import UndefinedError

    template, reads_parts = _compiled(source), _reads_parts(source)

    def filled(calls_as_text: bool) -> str:
        read = [_as_read(message, calls_as_text, reads_parts) for message in messages]
        if end:
            read[-1] = _ending_with(read[-1], end)
        try:
            return str(template.render({**names, "messages": read}))
        except MemoryError:
            raise
        except Exception as error:
            if not calls_as_text and isinstance(error, TypeError | UndefinedError):
                return filled(True)  # for example DeepSeek-R1's, which concatenates arguments to a string
            raise ChatTemplateError(f"the model's chat template: {error}") from error

    return filled(False)


@lru_cache
def _compiled(source: str) -> Any:
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"the model's chat template is not jinja: {error}") from error


@lru_cache
def _reads_parts(source: str) -> bool:
    """Return whether the template loops over a message's content parts. Others expect a string."""
    from jinja2 import nodes

    def is_content(node: nodes.Node) -> bool:
        named = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return named or (isinstance(node, nodes.Getattr) and node.attr == "content")

    tree = _environment().parse(source)
    aliases = {each.target.name for each in tree.find_all(nodes.Assign) if is_content(each.node)}
    aliases.add("content")
    loops = [each.iter for each in tree.find_all(nodes.For)]
    return any(is_content(each) or (isinstance(each, nodes.Name) and each.name in aliases) for each in loops)


def _reads_tools(source: str) -> bool:
    """Return whether a template reads `tools`. Raises `ConfigError` if it is not valid Jinja."""
    from jinja2 import meta

    _ = _compiled(source)
    return "tools" in meta.find_undeclared_variables(_environment().parse(source))


def _as_read(message: Mapping[str, Any], calls_as_text: bool, reads_parts: bool) -> dict[str, Any]:
    """Return a message as templates expect it: without nulls, with call arguments as objects.

    Args:
        message: a chat message.
        calls_as_text: use OpenAI's format for calls: arguments as text, and a null content.
        reads_parts: the template accepts content in parts; otherwise parts are joined.
    """
    found = {key: value for key, value in message.items() if value is not None}
    if found.get("tool_calls") == []:
        del found["tool_calls"]
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_read_call(call, calls_as_text) for call in calls]
        found = {"content": None} | found if calls_as_text else found
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning} | found | {"reasoning_content": reasoning}
    if isinstance(content := found.get("content"), list) and not reads_parts:
        found["content"] = "\n".join(part["text"] for part in content)
    return found


def _environment() -> Any:
    """Make the Jinja environment of `transformers`: its filter, globals and tag."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks assistant text for training. Rendering drops only the tags."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Arguments(dict[str, Any]):
    """Call arguments: an object that renders and concatenates as JSON text."""

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, text: str) -> str:
        return self._text + text

    def __radd__(self, text: str) -> str:
        return text + self._text


def _read_call(call: Any, as_text: bool) -> Any:
    """Return a call with its arguments as an object, or as JSON text; invalid arguments are unchanged."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    text = function.get("arguments")
    if isinstance(found := text, dict):
        text = _to_json(found)
    elif isinstance(text, str):
        try:
            found = json.loads(text or "{}")
        except (ValueError, RecursionError):
            return call
    if not isinstance(text, str) or not isinstance(found, dict):
        return call
    return call | {"function": function | {"arguments": text if as_text else _Arguments(found, text)}}


def _ending_with(message: dict[str, Any], end: str) -> dict[str, Any]:
    """Return a message with `end` appended to its text.

    Raises:
        ChatTemplateError: it has no text, or has tool calls.
    """
    content = message.get("content")
    if message.get("tool_calls"):
        raise ChatTemplateError("continue_final_message: the last message has tool_calls, which end it")
    if isinstance(content, str):
        return message | {"content": content + end}
    if content:
        return message | {"content": [*content[:-1], content[-1] | {"text": content[-1]["text"] + end}]}
    raise ChatTemplateError("continue_final_message: the last message has no content")


def load_chat_template(tokenizer: str | None, chosen: str | None = None) -> ChatTemplate | None:
    """Load the chat templates of a tokenizer; None if it has none.

    Args:
        tokenizer: a folder, a file in it, a GGUF file, or `none`.
        chosen: name of the template to always use, or a file with another one.

    Raises:
        ConfigError: a file cannot be read or is not valid Jinja, or `chosen` is neither a name nor a file.
    """
    sources: dict[str, str] = {}
    tokens: dict[str, Any] = {}
    if tokenizer is not None and tokenizer != "none":
        path = Path(tokenizer)
        sources, tokens = _read_gguf(path) if path.suffix == ".gguf" else _read_folder(path)
    if chosen is not None:
        if chosen not in sources and not (file := user_path(chosen, "serve.chat_template")).is_file():
            names = f", or one of the checkpoint's: {', '.join(sources)}" if sources else ""
            raise ConfigError(f"serve.chat_template={chosen}: no such file; give a file with jinja{names}")
        sources = {_DEFAULT: sources[chosen] if chosen in sources else _read_jinja(file)}
    if not sources:
        return None
    names = ", ".join(sources)
    absent = f"the checkpoint has no default chat template; set serve.chat_template or chat_template to one of {names}"
    source = sources.pop(_DEFAULT, f"{{{{ raise_exception({json.dumps(absent)}) }}}}")
    template = ChatTemplate(source, tokens, sources)
    template.check()
    return template


def checked_messages(messages: Any, name: str = "messages") -> list[dict[str, Any]]:
    """Return validated messages, with each content a text or a list of parts of the type `text`.

    Raises:
        ConfigError: not a list of objects with a `role` and such a `content`. It has the path, starting at `name`.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ConfigError(f'{name}: must be a list such as [{{"role": "user", "content": "..."}}]')
    return [_checked_message(f"{name}[{number}]", message) for number, message in enumerate(messages)]


def _checked_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{where}: must be an object with a role, such as user, and a content")
    if calls := message.get("tool_calls"):
        message = {**message, "tool_calls": _checked_calls(f"{where}.tool_calls", calls)}
    content, place = message.get("content"), f"{where}.content"
    if isinstance(content, list):
        return {
            **message,
            "content": [_checked_part(f"{place}[{number}]", part) for number, part in enumerate(content)],
        }
    if content is None and not message.get("tool_calls") and message["role"] in ("assistant", "tool"):
        return {**message, "content": ""}  # for example an answer with only reasoning
    if content is not None or message["role"] in ("system", "developer", "user"):
        _check_text(place, content, "a text, or a list of parts of type text")
    return dict(message)


def _checked_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return the calls of a message. `custom` tool calls become function calls with the only argument `input`."""
    if not isinstance(calls, list):
        raise ConfigError(f"{where}: must be a list of calls")
    found = []
    for number, call in enumerate(calls):
        is_custom = isinstance(call, dict) and call.get("type") == "custom"
        key, content, right = _CALLS[is_custom]
        called, place = call.get(key) if isinstance(call, dict) else None, f"{where}[{number}]"
        if not isinstance(called, dict) or not isinstance(called.get("name"), str):
            raise ConfigError(f"{place}.{key}.name: required, as a string, along with {content}")
        if not isinstance(given := called.get(content), str if is_custom else str | dict | None):
            raise ConfigError(f"{place}.{key}.{content}: must be {right}")
        custom = {"type": "function", "function": {"name": called["name"], "arguments": {content: given}}}
        found.append({**call, **custom} if is_custom else call)
    return found


def _checked_part(where: str, part: Any) -> dict[str, str]:
    if isinstance(part, str):
        part = {"text": part}
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: must be an object with the type text and a text")
    if kind not in _TEXT_PARTS:
        raise ConfigError(f"{where}: this model takes no {kind} parts, only text")
    name = _TEXT_PARTS[kind]
    _check_text(f"{where}.{name}", text := part.get(name), "a text")
    return {"type": "text", "text": text}


def _check_text(where: str, text: Any, right: str) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"{where}: must be {right}")
    if not is_unicode(text):
        raise ConfigError(f"{where}: half of a surrogate pair is not text")


def _read_gguf(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the templates of a GGUF file by name, and its special tokens."""
    file, key = open_gguf(path), "tokenizer.chat_template"
    texts = {
        name: text for name, text in file.fields.items() if isinstance(text, str)
    }  # tokenizer.chat_templates: names
    sources = {name.removeprefix(key)[1:] or _DEFAULT: text for name, text in texts.items() if name.startswith(key)}
    return sources, special_tokens(file) if sources else {}


def _read_folder(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the templates in a tokenizer's folder by name, and its special tokens."""
    folder = path if path.is_dir() else path.parent
    config = read_if_there(folder / "tokenizer_config.json")
    if not (sources := _sources(folder, config)):
        return {}, {}
    special = config.copy()
    if "added_tokens_decoder" not in config:  # present in newer files, which need no special_tokens_map.json
        special |= {name: token for name, token in read_if_there(folder / "special_tokens_map.json").items() if token}
    special = {name: value for name, value in special.items() if name.endswith("_token")}
    if isinstance(named := config.get("extra_special_tokens"), dict):
        special |= named
    kind = config.get("tokenizer_class")
    defaults = _CLASS_TOKENS.get(kind.removesuffix("Fast") if isinstance(kind, str) else "", ())
    special = dict(zip(("bos_token", "eos_token", "unk_token", "pad_token"), defaults, strict=False)) | special
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in special.items()}
    return sources, {name: text for name, text in texts.items() if isinstance(text, str)}


def _sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the templates of a folder: separate files take precedence over tokenizer_config.json."""
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (file := folder / "chat_template.jinja").is_file():
        files[_DEFAULT] = file
    if files:
        return {name: _read_jinja(each) for name, each in files.items()}
    found = config.get("chat_template")
    if found is None:
        found = read_if_there(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
    named = found if isinstance(found, dict) else {_DEFAULT: found}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _read_jinja(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not readable as UTF-8 ({reason(error)})") from error


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without Jinja's HTML escaping, like `transformers`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
