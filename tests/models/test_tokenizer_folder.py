"""What lies beside a vocabulary is read as transformers reads it, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Inner

from gapless.conf.errors import ConfigError
from gapless.models.tokenizer import load_tokenizer
from tests.models.test_tokenizer import byte_level, llama_like

SIZE = byte_level().get_vocab_size()
TEXTS = (
    "<|im_start|>the price in 2024 was 12345\n\nit's cafe\u0301<|im_end|>",
    "<tool> x <|end|> y <|pad|>",
    "a</s> b",
    "",
)


def token(content: str, special: bool = True, **over: Any) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, "special": special} | flags | over


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
QWEN2 = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "unk_token": "<|end|>", "pad_token": "<|end|>"}
GPT2 = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "unk_token": "<|end|>", "bos_token": "<|end|>"}
ADDED = {str(SIZE): token("<|im_start|>", rstrip=True), str(SIZE + 1): token("<tool>", False, lstrip=True)}
OLD = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}

TOKENIZER_JSON: dict[str, tuple[Callable[[], Inner], dict[str, Any], dict[str, Any]]] = {
    "added_tokens_decoder": (byte_level, FAST | {"added_tokens_decoder": ADDED}, {}),
    "changed flags": (byte_level, FAST | {"added_tokens_decoder": {"0": token("<|end|>", lstrip=True)}}, {}),
    "added_tokens.json": (byte_level, FAST, {"added_tokens.json": {"<|im_start|>": SIZE, "<|im_end|>": SIZE + 1}}),
    "special_tokens_map.json": (byte_level, FAST, {"special_tokens_map.json": OLD}),
    "new pad_token": (byte_level, FAST | {"pad_token": "<|pad|>", "eos_token": "<|end|>"}, {}),
    "extra tokens": (byte_level, FAST | {"extra_special_tokens": ["<tool>"]}, {}),
    "add_bos_token": (byte_level, FAST | {"add_bos_token": True, "bos_token": "<|end|>"}, {}),
    "add_bos_token=false": (llama_like, FAST | {"add_bos_token": False, "bos_token": "<s>", "eos_token": "</s>"}, {}),
}
VOCABULARY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", QWEN2, {}),
    "qwen2 by model_type": ("qwen2", {}, {}),
    "qwen3 by model_type": ("qwen3", {}, {}),
    "qwen2 with added tokens": ("qwen2", QWEN2 | {"added_tokens_decoder": {"0": token("<|end|>"), **ADDED}}, {}),
    "qwen2 with old files": ("qwen2", QWEN2, {"special_tokens_map.json": OLD}),
    "qwen2 with add_prefix_space": ("qwen2", QWEN2 | {"add_prefix_space": True}, {}),
    "gpt2": ("gpt2", GPT2, {}),
    "gpt2 by model_type": ("gpt2", {}, {}),
    "gpt2 with add_prefix_space": ("gpt2", GPT2 | {"add_prefix_space": True}, {}),
    "gpt2 with add_bos_token": ("gpt2", GPT2 | {"add_bos_token": True}, {}),
    "gpt2 with add_eos_token": ("gpt2", GPT2 | {"add_eos_token": True}, {}),
    "gpt2 with old files": ("gpt2", GPT2, {"added_tokens.json": {"<tool>": SIZE}, "special_tokens_map.json": {}}),
}


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))


def check(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder, 4096)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    named = json.loads((folder / "tokenizer_config.json").read_text()).get("eos_token")
    assert ours.eos_token_ids == ((theirs.eos_token_id,) if named else ours.eos_token_ids)


@pytest.mark.parametrize("kind", TOKENIZER_JSON)
def test_tokens_beside_a_tokenizer_json_are_added(kind: str, tmp_path: Path) -> None:
    build, settings, files = TOKENIZER_JSON[kind]
    build().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, files | {"tokenizer_config.json": settings})
    check(tmp_path)


@pytest.mark.parametrize("kind", VOCABULARY)
def test_a_vocabulary_is_split_by_its_own_rule(kind: str, tmp_path: Path) -> None:
    model, settings, files = VOCABULARY[kind]
    byte_level().model.save(str(tmp_path))
    write(tmp_path, files | {"tokenizer_config.json": settings, "config.json": {"model_type": model}})
    check(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 7\n"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"added_tokens_decoder": {str(SIZE + 5): token("<|im_start|>")}}, "'<|im_start|>' has id 325"),
        ({"added_tokens_decoder": {"a": token("x")}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"0": "x"}}, "added_tokens_decoder"),
        ({"split_special_tokens": True}, "split_special_tokens"),
        ({"add_prefix_space": True}, "add_prefix_space=True"),
        ({"eos_token": 3}, "special token 3"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {"tokenizer_config.json": FAST | settings})
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path, 4096)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "LlamaTokenizer", "RobertaTokenizer", "PreTrainedTokenizerFast"])
def test_a_vocabulary_of_another_kind_needs_a_tokenizer_json(kind: str, tmp_path: Path) -> None:
    byte_level().model.save(str(tmp_path))
    write(tmp_path, {"tokenizer_config.json": {"tokenizer_class": kind}})
    with pytest.raises(ConfigError, match=f"{kind}.*as tokenizer.json"):
        load_tokenizer(tmp_path, 4096)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"])
def test_a_pointer_in_place_of_a_file_is_named(file: str, tmp_path: Path) -> None:
    if file.startswith("tokenizer"):
        byte_level().save(str(tmp_path / "tokenizer.json"))
    else:
        byte_level().model.save(str(tmp_path))
    (tmp_path / file).write_text(POINTER)
    with pytest.raises(ConfigError, match=rf"{file}: a Git LFS pointer"):
        load_tokenizer(tmp_path, 4096)
