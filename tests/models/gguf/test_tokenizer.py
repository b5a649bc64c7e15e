"""Tokenizers of GGUF files give the ids of llama.cpp, as `tests/support/llama_ids.py` recorded them.

Those of SentencePiece were had from llama.cpp, by llama-cpp-python 0.3.36: `Llama(file,
vocab_only=True).tokenize(text, add_bos=False, special=True)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from gapless.conf.errors import ConfigError
from gapless.models.chat_template import load_chat_template
from gapless.models.gguf.file import GgufFile
from gapless.models.gguf.pre_tokenizers import SPLITS
from gapless.models.gguf.smollm2 import smollm2
from gapless.models.gguf.tokenizer import make_tokenizer, special_tokens
from gapless.models.tokenizer import _byte_level_table, load_tokenizer
from tests.support.llama_ids import RECORDED, TEXTS, digest, write_vocabulary

TEXT = "I'LL don't  12345 x²,\n\n  añ١٢٣ _a__b 你好吗!?\r\nEtE end "  # noqa: RUF001
LONGEST = 6  # characters of a token


def byte_level_fields() -> dict[str, Any]:
    """Make a vocabulary in which each piece of `TEXT` of up to six bytes is a token, and ids show the cuts."""
    character = {byte: char for char, byte in _byte_level_table().items()}
    text = "".join(character[byte] for byte in TEXT.encode())
    tokens = [character[byte] for byte in range(256)] + ["<s>", "</s>", "<tool>"]
    merges = []
    for length in range(2, LONGEST + 1):
        for start in range(len(text) - length + 1):
            token = text[start : start + length]
            if token not in tokens:
                tokens.append(token)
                merges.append(f"{token[:-1]} {token[-1]}")
    return {"tokens": tokens, "merges": merges}


def write_tokenizer(file: Path, kind: str, pre: str | None, fields: dict[str, Any], **more: Any) -> GgufFile:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = fields["tokens"]
    types = {"<s>": 3, "</s>": 3, "<tool>": 4, "<unk>": 2}
    writer.add_token_list(tokens)
    writer.add_token_types([types.get(token, 6 if token.startswith("<0x") else 1) for token in tokens])
    if "merges" in fields:
        writer.add_token_merges(fields["merges"])
    if "scores" in fields:
        writer.add_token_scores(fields["scores"])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(file)


def sentence_piece_fields() -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [
        "▁a",
        "ab",
        "▁ab",
        "abc",
        "▁abc",
        "▁▁",
        "▁▁▁",
        "ñ",
        "ca",
        "b",
        "a",
        "c",
        "▁",
        "1",
        "2",
        "12",
        "▁12",
        "é",
        "n",
    ]
    return {"tokens": [*pieces, *words], "scores": [0.0] * len(pieces) + [-float(i) for i in range(len(words))]}


SENTENCE = "abcab  12ñ 你 cab\nabc   a"


def ids(text: str) -> list[int]:
    return list(map(int, text.split()))


SENTENCE_IDS = ids("263 260 264 274 266 271 231 192 163 271 270 260 13 262 264 259")
SMOLLM2_IDS = {
    "Hello world, it's 1234 o'clock.\n\n  Tabs\tand <|im_start|>user\n": ids(
        "19556 905 28 357 506 216 33 34 35 36 263 23 17466 30 8866 312 7366 197 397 216 1 4093 198"
    ),
    "привет мир 你好世界 こんにちは 안녕 שלום مرحبا नमस्ते": ids(
        "21339 46879 16464 32547 41337 7872 9175 216 18645 250 48392 138 7906 240 178 239 230 46673 237 10391 "
        "237 41152 7365 111 7365 124 18601 239 226 182 223 239 12960 119 31838 23970 162 247 36395 20602 "
        "44626 31462 10805 12335 118 35090 38770 16525 26293 30581"
    ),
    "🙂👩\u200d👩\u200d👧 naïve café ½ x²+y³ ٣٤ Ⅷ": ids(
        "10813 38887 10813 235 119 321 231 10813 235 119 321 231 10813 235 117 15486 46494 37366 216 16738 "
        "1792 19133 27 105 39050 216 164 113 164 114 216 173 223 117"
    ),
    "  \r\n\xa0end   ": ids("256 2738 15442 486 333"),
    "def f(x):\n    return x  # ok\n\n\n": ids("1604 275 24 104 727 472 1003 1792 216 907 10907 16506"),
    "I'LL we've DON'T 'tis": ids("57 23 16421 392 3543 422 2154 23 68 637 34818"),
    "   leading": ids("256 2899"),
}


@pytest.mark.parametrize("pre", [*SPLITS, None])
def test_ids_of_forty_texts_are_those_of_llama_cpp(pre: str | None, tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "model.gguf", pre)
    tokenizer = load_tokenizer(file, 10_000)
    recorded = json.loads(RECORDED.read_text())[str(pre)].split()
    assert len(recorded) == len(TEXTS) >= 40
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert [text for text, found, of in zip(TEXTS, ids, recorded, strict=True) if digest(found) != of] == []
    assert [tokenizer.decode(each) for each in ids] == list(TEXTS)


def test_an_empty_pre_is_a_missing_one(tmp_path: Path) -> None:
    files = [write_vocabulary(tmp_path / f"{number}.gguf", pre) for number, pre in enumerate(("", None))]
    empty, missing = (load_tokenizer(file, 10_000) for file in files)
    assert list(map(empty.encode, TEXTS)) == list(map(missing.encode, TEXTS))


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path) -> None:
    file = write_vocabulary(tmp_path / "model.gguf", "gpt-2", add_bos_token=True, add_eos_token=True)
    tokenizer = load_tokenizer(file, 10_000)
    assert tokenizer.encode("a") == [256, 97, 257]
    assert tokenizer.encode("a", add_special=False) == [97]


def test_pieces_merge_by_their_scores_and_what_is_none_becomes_bytes(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "model.gguf", "llama", None, sentence_piece_fields())
    tokenizer = make_tokenizer(file)
    assert tokenizer.encode(SENTENCE, add_special_tokens=False).ids == SENTENCE_IDS
    assert tokenizer.encode(SENTENCE).ids == [1, *SENTENCE_IDS]
    assert tokenizer.decode(SENTENCE_IDS) == SENTENCE


def test_special_tokens_of_the_file(tmp_path: Path) -> None:
    fields = byte_level_fields()
    file = write_tokenizer(
        tmp_path / "model.gguf", "gpt2", "gpt-2", fields, add_bos_token=True, chat_template="{{ bos_token }}!"
    )
    tokenizer = load_tokenizer(file.path, 10_000)
    assert tokenizer.encode("a<tool></s>") == [256, fields["tokens"].index("a"), 258, 257]
    assert tokenizer.decode([258, 257]) == "<tool>"
    assert tokenizer.eos_token_ids == (257,)
    assert special_tokens(file) == {"bos_token": "<s>", "eos_token": "</s>"}
    template = load_chat_template(str(file.path))
    assert template is not None
    assert template.render([], False) == "<s>!"


@pytest.mark.parametrize(
    ("kind", "pre", "said"),
    [
        ("bert", None, "tokenizer.ggml.model='bert' is not supported (supported: gpt2, llama); set model.tokenizer"),
        ("gpt2", "qwen", "tokenizer.ggml.pre='qwen' is not supported; set model.tokenizer to a folder"),
        ("llama", None, "tokenizer.ggml.scores has 0 values for"),
    ],
)
def test_what_is_not_supported_is_named(kind: str, pre: str | None, said: str, tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "model.gguf", kind, pre, byte_level_fields())
    with pytest.raises(ConfigError) as caught:
        make_tokenizer(file)
    assert f"{file.path}: {said}" in str(caught.value)


def test_the_tokens_of_smollm2() -> None:
    try:
        tokenizer = load_tokenizer(smollm2(), 49152)
    except ConfigError as error:
        pytest.skip(str(error))
    assert {text: tokenizer.encode(text) for text in SMOLLM2_IDS} == SMOLLM2_IDS
