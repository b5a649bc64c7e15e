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
from tests.support.tiers import first_quick

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


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "config.json"])
def test_a_byte_order_mark_changes_nothing(file: str, tmp_path: Path) -> None:
    byte_level().model.save(str(tmp_path))
    write(tmp_path, {"tokenizer_config.json": QWEN2, "config.json": {"model_type": "qwen2"}})
    if file == "tokenizer.json":
        byte_level().save(str(tmp_path / file))
    plain = load_tokenizer(tmp_path, 4096)
    (tmp_path / file).write_bytes(b"\xef\xbb\xbf" + (tmp_path / file).read_bytes())
    marked = load_tokenizer(tmp_path, 4096)
    assert [marked.encode(text) for text in TEXTS] == [plain.encode(text) for text in TEXTS]


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
    with pytest.raises(ConfigError, match=f"{kind.removesuffix('Fast')}.*as tokenizer.json"):
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


LLAMA = json.loads(llama_like().to_str())["model"]["vocab"]
MERGES = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("▁", "▁")]
BYTES = json.loads(byte_level().to_str())["model"]
OF_BYTES = {
    "vocab": BYTES["vocab"] | {"<|endoftext|>": SIZE, "<|END_OF_TURN_TOKEN|>": SIZE + 1},
    "merges": [tuple(pair) for pair in BYTES["merges"]],
}
IN_CODE = ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>")
ROLES = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|end|>")
CLASSES: dict[str, Callable[[], Any]] = {
    "LlamaTokenizer": lambda: transformers.LlamaTokenizer(vocab=dict(LLAMA), merges=MERGES),
    "CodeLlamaTokenizer": lambda: transformers.CodeLlamaTokenizer(
        vocab=LLAMA | {each: len(LLAMA) + n for n, each in enumerate(IN_CODE)}, merges=MERGES
    ),
    "GemmaTokenizer": lambda: transformers.GemmaTokenizer(
        vocab={w: i for i, w in enumerate(dict.fromkeys(["<pad>", "<eos>", "<bos>", "<unk>", *LLAMA]))}, merges=MERGES
    ),
    "GPT2Tokenizer": lambda: transformers.GPT2Tokenizer(**OF_BYTES, **ROLES),
    "GPTNeoXTokenizer": lambda: transformers.GPTNeoXTokenizer(**OF_BYTES, **ROLES),
    "Qwen2Tokenizer": lambda: transformers.Qwen2Tokenizer(**OF_BYTES, **ROLES),
    "CohereTokenizer": lambda: transformers.CohereTokenizer(**OF_BYTES, **ROLES),
    "TokenizersBackend": lambda: transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), **ROLES),
    "of a Llama": lambda: transformers.PreTrainedTokenizerFast(
        tokenizer_object=llama_like(), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ),
}
ABSENT = object()
ANY = (True, False, None, ABSENT)
STRIPS = {"__type": "AddedToken"} | token("<|new|>", lstrip=True)
KEYS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"), ANY),
    **dict.fromkeys(("clean_up_tokenization_spaces", "split_special_tokens", "spaces_between_special_tokens"), ANY),
    **dict.fromkeys(("bos_token", "eos_token", "unk_token"), ("e", "<|new|>", STRIPS, None, ABSENT)),
    **dict.fromkeys(("pad_token", "mask_token", "sep_token", "cls_token", "image_token"), ("<|new|>", STRIPS, None)),
    "additional_special_tokens": (["<|new|>"], [STRIPS], [], None),
    "extra_special_tokens": (["<|new|>"], {"image_token": "<|new|>"}, {}, None),
    "model_specific_special_tokens": ({"image_token": "<|new|>"},),
    **dict.fromkeys(("padding_side", "truncation_side"), ("left", "right")),
    **dict.fromkeys(("model_max_length", "max_len", "max_length", "stride"), (3,)),
    **dict.fromkeys(("do_lower_case", "strip_accents", "trim_offsets", "keep_accents", "remove_space"), (True, False)),
    **dict.fromkeys(("use_fast", "from_slow", "use_default_system_prompt"), (True, False)),
    "errors": ("ignore",),
    "chat_template": ([{"name": "default", "template": "x"}],),
    "tokenizer_class": ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "Unknown", None, ABSENT),
}
# Checkpoints of which transformers takes no key from the file: flags of Qwen2's tokens, and classes that contradict it.
OWN_WAY = {("Qwen2Tokenizer", "lstrip"), ("CodeLlamaTokenizer", "model_specific_special_tokens")}
SPACED = ("x<|new|> y <|new|>z e", "the<s>x</s>y<eos>the", " it 's 12345 . do n't , ok ?", "  two\n\nthe  The\t", "")


def of_folder(theirs: Any) -> list[Any]:
    found = [
        (
            theirs(text)["input_ids"],
            theirs.encode(text, add_special_tokens=False),
            theirs.decode(theirs(text)["input_ids"]),
        )
        for text in SPACED
    ]
    return [*found, theirs.eos_token_id]


def of_ours(ours: Any) -> list[Any]:
    found = [
        (ours.encode(text), ours.encode(text, add_special=False), ours.decode(ours.encode(text), skip_special=False))
        for text in SPACED
    ]
    return [*found, next(iter(ours.eos_token_ids), None)]


@pytest.mark.parametrize("kind", first_quick(CLASSES))
def test_a_changed_key_gives_the_ids_and_texts_of_transformers_or_is_named(kind: str, tmp_path: Path) -> None:
    CLASSES[kind]().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    plain, wrong = json.loads(file.read_text()), []
    for key, value in [("", ABSENT), *((key, value) for key, values in KEYS.items() for value in values)]:
        settings = {name: each for name, each in plain.items() if name != key}
        file.write_text(json.dumps(settings if value is ABSENT else settings | {key: value}))
        try:
            theirs = of_folder(transformers.AutoTokenizer.from_pretrained(tmp_path))
        except (AttributeError, TypeError, ValueError):
            continue
        try:
            ours = of_ours(load_tokenizer(tmp_path, 4096))
        except ConfigError as error:
            ours = theirs if key in str(error) else error
        is_own_way = (kind, key) in OWN_WAY or ((kind, "lstrip") in OWN_WAY and "lstrip" in str(value))
        if ours != theirs and not is_own_way:
            wrong.append((key, value, ours, theirs))
    assert wrong == []
