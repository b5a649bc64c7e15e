"""Chat templates give what `transformers` gives for the same file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import gapless.models
from gapless.conf.errors import ConfigError
from gapless.models.chat_template import ChatTemplate, ChatTemplateError, load_chat_template

SHIPPED = Path(gapless.models.__path__[0]) / "shipped"
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
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = load_chat_template(str(tmp_path))
    assert found is not None
    assert found.render([], True) == "b"
    (tmp_path / "chat_template.jinja").write_text("c")
    found = load_chat_template(str(tmp_path / "tokenizer.json"))
    assert found is not None
    assert found.render([], True) == "c"
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="not jinja"):
        load_chat_template(str(tmp_path))
