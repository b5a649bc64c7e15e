"""Chat templates give what `transformers` gives for the same file."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from tokenizers import Tokenizer, models

import gapless.models
from gapless.conf.errors import ConfigError
from gapless.models import chat_template
from gapless.models.chat_template import (
    _CLASS_TOKENS,
    ChatTemplate,
    ChatTemplateError,
    checked_messages,
    load_chat_template,
)

SHIPPED = Path(gapless.models.__path__[0]) / "shipped"
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
CHATML = (
    "{%- for message in messages %}\n"
    "    {%- if loop.first and message['role'] != 'system' %}{{ bos_token }}{%- endif %}\n"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}\n"
    "{{ {'a': 'ü<'} | tojson }}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [
        {"role": "system", "content": " be brief "},
        {"role": "user", "content": "1 < 2?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why"},
    ],
]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompts", [True, False])
def test_a_chat_is_rendered_as_transformers_does(chat: list[dict[str, Any]], prompts: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=prompts
    )
    template = load_chat_template(str(tmp_path))
    assert template is not None
    assert template.render(chat, prompts) == expected


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 3}}}
AGENT: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?", "name": None},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None, "function_call": None},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "assistant", "content": "It rains. ", "reasoning": "look", "tool_calls": None},
]
SPECIAL = "{{ bos_token }}{{ unk_token }}{{ pad_token is defined }}{{ add_bos_token is defined }}{{ image_token }}"
CALLS = (
    "{% for m in messages %}<{{ m.role }}{{ ' ' ~ m.name if m.name is defined }}>{{ m.content }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}"
    "{% for k, v in c.function.arguments | items %}[{{ k }}={{ v }}]{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "special tokens": SPECIAL,
    "calls": CALLS,
    "generation": "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}{{ x }}\n"
    "{% endfor %}",
    "json": "{{ messages[:1] | tojson(indent=2) }}"
    "{{ {'b': 'ü', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "loops": "{% for m in messages %}{% if loop.index == 1 %}{% continue %}{% endif %}{{ m.role }}{% break %}"
    "{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{% endfor %}",
    "names": "{{ tools is none }}{{ documents is none }}{{ strftime_now('%Y') | length }}{{ add_generation_prompt }}",
}


def both(folder: Path, source: str, config: dict[str, Any] | None = None) -> tuple[Any, ChatTemplate]:
    """Make a tokenizer of transformers with this template, and our template."""
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SHIPPED / name, folder)
    found = json.loads((folder / "tokenizer_config.json").read_text()) | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(found))
    (folder / "chat_template.jinja").write_text(source)
    template = load_chat_template(str(folder))
    assert template is not None
    return AutoTokenizer.from_pretrained(folder), template


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_find_what_transformers_gives_them(name: str, tmp_path: Path) -> None:
    config = {"bos_token": None, "unk_token": "<u>", "pad_token": None, "add_bos_token": True, "image_token": "<i>"}
    theirs, ours = both(tmp_path, TEMPLATES[name], config)
    expected = theirs.apply_chat_template(AGENT, tokenize=False, add_generation_prompt=True)
    assert ours.render(AGENT, True) == expected


@pytest.mark.parametrize("is_null", [True, False])
def test_the_map_of_special_tokens_names_what_the_config_does_not(is_null: bool, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": None} if is_null else {}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<b>"}, "eos_token": None}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    template = load_chat_template(str(tmp_path))
    assert template is not None
    assert template.render([], False) == "<b>"


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"city": "Zürich", "days": 3}', '{"city": "Zürich", "days": 3}'),
        ("", "{}"),
        ("no JSON", '"no JSON"'),
        ("[1]", '"[1]"'),
        (None, "null"),
    ],
)
def test_arguments_are_an_object_where_their_text_is_one(arguments: str | None, read: str) -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", {})
    call = {"function": {"name": "f", "arguments": arguments}}
    assert template.render([{"role": "assistant", "tool_calls": [call]}], False) == read


def test_calls_are_as_sent_where_the_template_takes_no_others() -> None:
    """DeepSeek-R1's knows a call by a content of null, and adds the text of its arguments to others."""
    source = (
        "{% for m in messages %}{% if m.content is none %}{{ '<' + m.tool_calls[0].function.arguments + '>' }}"
        "{% else %}{{ '[' + m.content + ']' }}{% endif %}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": '{"a": 1}'}}]
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert ChatTemplate(source, {}).render(chat, False) == '[x]<{"a": 1}>'
    with pytest.raises(ChatTemplateError, match="no attribute"):
        ChatTemplate(source, {}).render([{"role": "assistant"}], False)


@pytest.mark.parametrize("sent", ['{"city": "Zürich",  "days": 3}', {"city": "Zürich", "days": 3}])
@pytest.mark.parametrize(
    "source",
    [
        "{{ arguments }}",
        "{{ arguments ~ '' }}",
        "{{ '' + arguments }}",
        "{{ arguments + '' }}",
        "{{ arguments | string }}",
        "{{ '%s' | format(arguments) }}",
        "{{ arguments if arguments is string else arguments | tojson }}",
    ],
)
def test_arguments_that_a_template_writes_are_json(sent: object, source: str) -> None:
    source = "{% set arguments = messages[0].tool_calls[0].function.arguments %}" + source
    call = {"function": {"name": "f", "arguments": sent}}
    found = ChatTemplate(source, {}).render([{"role": "assistant", "tool_calls": [call]}], False)
    assert json.loads(found) == {"city": "Zürich", "days": 3}
    assert "Zürich" in found


def test_objects_reach_templates_that_add_them_to_a_text() -> None:
    source = (
        "{% for m in messages if m.content is none %}{{ '<' + m.tool_calls[0].function.arguments.strip() }}{% else %}"
        "{{ messages[0].content.strip() }}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    assert ChatTemplate(source, {}).render([{"role": "assistant", "tool_calls": [call]}], False) == '<{"a": 1}'


def test_no_calls_are_as_absent() -> None:
    template = ChatTemplate("{{ 'tool_calls' in messages[0] }}", {})
    assert template.render([{"role": "assistant", "content": "x", "tool_calls": []}], False) == "False"


PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content }}", "a\nb"),
        ("{% for p in messages[0]['content'] %}<{{ p.type }} {{ p.text }}>{% endfor %}", "<text a><text b>"),
        ("{% set c = messages[0].content %}{% for p in c %}{{ p.text }}{% endfor %}", "ab"),
        (
            "{% macro of(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{{ of(messages[0].content) }}",
            "ab",
        ),
    ],
)
def test_parts_are_one_text_unless_the_template_reads_parts(source: str, text: str) -> None:
    assert ChatTemplate(source, {}).render(PARTS, False) == text


@pytest.mark.parametrize(
    "source",
    ["{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}", CHATML.rpartition("\n")[0]],
)
@pytest.mark.parametrize("last", ["It rains", "It rains. ", " It"])
def test_a_last_message_is_continued_as_transformers_does(source: str, last: str, tmp_path: Path) -> None:
    theirs, ours = both(tmp_path, source)
    chat = [{"role": "user", "content": "weather?"}, {"role": "assistant", "content": last}]
    expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert ours.render(chat, False, continue_final_message=True) == expected


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "assistant"}],
        [{"role": "assistant", "content": "x"}],
        [{"role": "assistant", "content": "x", "tool_calls": [CALL]}],
    ],
)
def test_nothing_to_continue_is_said(chat: list[dict[str, Any]]) -> None:
    with pytest.raises(ChatTemplateError, match="continue_final_message"):
        ChatTemplate("{{ messages[0].role }}", {}).render(chat, False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="add_generation_prompt"):
        ChatTemplate("{{ messages[0].content }}", {}).render(chat, True, continue_final_message=True)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (5, r"messages\[0\]: must be an object"),
        ({"content": "x"}, r"messages\[0\]: must be an object with a role"),
        ({"role": "user", "content": 5}, r"messages\[0\]\.content: must be a text"),
        *(({"role": role}, r"messages\[0\]\.content: must be a text") for role in ("user", "system", "developer")),
        ({"role": "user", "content": None}, r"messages\[0\]\.content: must be a text"),
        ({"role": "user", "content": "\ud83d"}, r"messages\[0\]\.content: half of a surrogate"),
        ({"role": "user", "content": [{"type": "text"}]}, r"messages\[0\]\.content\[0\]\.text: must be a text"),
        (
            {"role": "user", "content": ["a", {"type": "image_url"}]},
            r"content\[1\]: this model takes no image_url parts",
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom"}]},
            r"tool_calls\[0\]\.custom\.name: required, as a string",
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": "function"}]},
            r"tool_calls\[0\]\.function\.name: required, as a string",
        ),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "run", "input": {}}}]},
            r"tool_calls\[0\]\.custom\.input: must be a text",
        ),
    ],
)
def test_a_wrong_message_is_named(message: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checked_messages([message])


@pytest.mark.parametrize("role", ["assistant", "tool"])
@pytest.mark.parametrize("keys", [{}, {"content": None}, {"content": None, "reasoning_content": "r", "tool_calls": []}])
def test_an_answer_without_content_is_an_empty_text(role: str, keys: dict[str, Any]) -> None:
    chat = checked_messages([{"role": "user", "content": "a"}, {"role": role, **keys}])
    source = "{% for message in messages %}{{ '<' + message.content + '>' }}{% endfor %}"
    assert ChatTemplate(source, {}).render(chat, False) == "<a><>"


def test_a_custom_call_is_read_as_a_function_s() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "run", "input": 'say "x"'}}
    (found,) = checked_messages([{"role": "assistant", "content": None, "tool_calls": [call, CALL]}])
    assert found["tool_calls"][1] == CALL
    template = ChatTemplate("{% for c in messages[0].tool_calls %}{{ c.function | tojson }}{% endfor %}", {})
    read = json.loads(template.render([{**found, "tool_calls": found["tool_calls"][:1]}], False))
    assert read == {"name": "run", "arguments": {"input": 'say "x"'}}


def test_a_template_can_refuse_and_cannot_reach_out() -> None:
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        refusing.render([], True)
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render([], True)
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages.append(1) }}", {}).render([], True)


def test_files(tmp_path: Path) -> None:
    """Its own file comes first; a list of named templates has a default; no template is None; bad jinja is one line."""
    assert load_chat_template(None) is None
    assert load_chat_template(str(tmp_path)) is None
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    for templates in (named, {"tool_use": "a", "default": "b"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        found = load_chat_template(str(tmp_path))
        assert found is not None
        assert found.render([], True) == "b"
    (tmp_path / "chat_template.jinja").write_text("c")
    found = load_chat_template(str(tmp_path / "tokenizer.json"))
    assert found is not None
    assert found.render([], True) == "c"
    for content, wrong in ((b"{% for %}", "not jinja"), (b"\xe9", "not readable as UTF-8")):
        (tmp_path / "chat_template.jinja").write_bytes(content)
        with pytest.raises(ConfigError, match=wrong):
            load_chat_template(str(tmp_path))


@pytest.mark.parametrize("suffix", ["", "Fast"])
@pytest.mark.parametrize("kind", _CLASS_TOKENS)
def test_tokens_that_no_file_names_are_those_of_the_tokenizer_s_class(kind: str, suffix: str, tmp_path: Path) -> None:
    signature = inspect.signature(getattr(transformers, kind).__init__)
    defaults = {name: signature.parameters[name].default for name in TOKENS if name in signature.parameters}
    (tmp_path / "chat_template.jinja").write_text("".join(f"[{{{{ {name} }}}}]" for name in TOKENS))
    for given in ({}, {"eos_token": "<end>"}, {"bos_token": None}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind + suffix} | given))
        template = load_chat_template(str(tmp_path))
        assert template is not None
        expected = defaults | given
        texts = [str(expected[name]) if expected.get(name) is not None else "" for name in TOKENS]
        assert template.render([], False) == "".join(f"[{text}]" for text in texts)


NAMED = {"default": "D", "tool_use": "T", "rag": "R"}


def write_list(folder: Path, named: dict[str, str]) -> None:
    listed = [{"name": name, "template": text} for name, text in named.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))


def write_object(folder: Path, named: dict[str, str]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))


def write_files(folder: Path, named: dict[str, str]) -> None:
    (folder / "additional_chat_templates").mkdir()
    for name, text in named.items():
        file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (folder / file).write_text(text)


def write_fields(folder: Path, named: dict[str, str]) -> None:
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_token_list(["a"])
    writer.add_chat_template([{"name": name, "template": text} for name, text in named.items()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("write", [write_list, write_object, write_files, write_fields])
@pytest.mark.parametrize(
    "names", [("default",), ("default", "tool_use"), ("default", "tool_use", "rag"), ("tool_use",)]
)
def test_the_named_template_is_that_of_transformers(
    write: Callable[[Path, dict[str, str]], None], names: tuple[str, ...], tmp_path: Path
) -> None:
    write(tmp_path, named := {name: NAMED[name] for name in names})
    source = tmp_path / "model.gguf" if write is write_fields else tmp_path
    template = load_chat_template(str(source))
    assert template is not None
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    reference.chat_template = named
    for tools in (None, [{"type": "function"}]):
        for name in (None, *names):
            found = template.pick(tools is not None, name)
            try:
                expected = reference.get_chat_template(name, tools)
            except ValueError:
                with pytest.raises(ChatTemplateError, match="no default chat template"):
                    found.render([], False)
            else:
                assert found.render([], False) == expected
    with pytest.raises(ChatTemplateError, match="chat_template: must be the name of one of the checkpoint's"):
        template.pick(False, "{{ messages }}")


def test_the_server_chooses_a_template_by_name_or_file(tmp_path: Path) -> None:
    write_list(tmp_path, NAMED)
    (tmp_path / "own.jinja").write_text("\ufeffO")
    for chosen, text in (("rag", "R"), (str(tmp_path / "own.jinja"), "O")):
        template = load_chat_template(str(tmp_path), chosen)
        assert template is not None
        assert template.pick(True).render([], False) == text
    with pytest.raises(ConfigError, match=r"serve.chat_template=rags: no such file; .*default, tool_use, rag"):
        load_chat_template(str(tmp_path), "rags")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 10 ** (messages | length * 10 ** 9) }}",
        "{{ lipsum(n=messages | length * 10 ** 8) }}",
        "{{ messages[0].content * 10 ** 9 }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ messages[0].content | center(10 ** 10) }}",
        "{{ '%10000000000d' % messages | length }}",
        "{% set x = namespace(a='a') %}{% for _ in range(60) %}{% set x.a = x.a + x.a %}{% endfor %}",
        "{% set x = namespace(a=[1]) %}{% for _ in range(60) %}{% set x.a = x.a + x.a %}{% endfor %}",
    ],
)
def test_what_exceeds_a_limit_is_refused_and_the_next_renders(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(chat_template, "LONGEST_S", 0.2)
    with pytest.raises(ChatTemplateError, match=r"^the model's chat template: not done within 0\.2 s .* and 512 MiB$"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}], True)
    assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": "a"}], True) == "a"


def test_a_template_that_does_not_compile_within_the_limits_is_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "LONGEST_S", 0.2)
    (tmp_path / "chat_template.jinja").write_text("{{ 7 ** (7 ** 9) }}")  # jinja computes constants
    with pytest.raises(ConfigError, match="the model's chat template: not done within"):
        load_chat_template(str(tmp_path))
