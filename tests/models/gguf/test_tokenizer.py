"""Tokenizers of GGUF files give the ids of llama.cpp.

The ids were had from llama.cpp, by llama-cpp-python 0.3.36: `Llama(file, vocab_only=True).tokenize(text, add_bos=False,
special=True)`. The vocabulary files in llama.cpp's repository (gpt-2, llama-bpe, llama-spm, phi-3, qwen2, starcoder,
refact, command-r, deepseek-llm, deepseek-coder, falcon, mpt), with the 47 texts and ids beside each, were compared by
hand, as were 660 texts for each pre-tokenizer with three of these vocabularies; they are too large to stand here. For
`tekken`, `gpt-4o`, `kimi-k2` and `tiny_aya` this package has the expressions of the models' own tokenizer.json, where
llama.cpp's takes capitals beyond ASCII for small letters too, or cuts no words at capitals.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from gapless.conf.errors import ConfigError
from gapless.models.chat_template import load_chat_template
from gapless.models.gguf.file import GgufFile
from gapless.models.gguf.smollm2 import smollm2
from gapless.models.gguf.tokenizer import make_tokenizer, special_tokens
from gapless.models.tokenizer import _byte_level_table, load_tokenizer

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


# By `tokenizer.ggml.pre`; several names stand for the same cuts.
EXPECTED = {
    ("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "exaone4", "gigachat", "granite-docling"): ids(
        "73 39 261 263 265 267 32 270 272 274 276 278 44 342 283 285 287 289 291 293 97 296 98 299 301 303 "
        "305 307 309 13 10 375 316 318 32"
    ),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"): ids(
        "73 39 261 263 265 267 269 49 50 51 52 53 276 278 44 342 283 285 287 289 291 293 97 296 98 299 301 "
        "303 305 307 309 13 10 375 316 318 32"
    ),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "glm4"): ids(
        "73 321 385 267 32 32 332 274 276 278 341 32 406 529 293 97 296 98 299 301 303 305 307 432 375 439 32"
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): ids(
        "73 321 263 265 267 32 32 332 274 276 278 341 32 283 285 287 289 291 293 97 296 98 299 301 303 305 "
        "307 309 311 375 316 318 32"
    ),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"): ids(
        "73 321 263 265 267 32 32 49 50 51 52 53 276 278 341 32 283 285 287 289 291 293 97 296 98 299 301 303 "
        "305 307 309 311 375 316 318 32"
    ),
    ("gpt-4o", "llama4", "minimax-m2", "kanana2"): ids(
        "259 261 263 265 267 32 32 332 274 276 278 341 32 283 285 287 289 291 293 97 296 98 299 301 303 305 "
        "307 309 311 313 69 316 318 32"
    ),
    ("tiny_aya",): ids(
        "259 261 263 265 267 269 271 334 276 278 341 32 283 285 287 289 291 293 97 296 98 299 301 303 305 307 "
        "309 311 313 69 316 318 32"
    ),
    ("tekken",): ids(
        "73 321 385 267 32 32 49 50 51 52 53 276 278 341 32 406 287 289 291 293 97 296 98 299 301 303 305 307 "
        "432 313 69 439 32"
    ),
    ("kimi-k2",): ids(
        "259 261 263 265 267 32 32 332 274 276 278 341 32 283 285 287 289 291 293 97 296 98 32 300 302 304 "
        "368 309 311 313 69 316 318 32"
    ),
    ("seed-coder",): ids(
        "73 321 263 265 267 32 32 49 50 51 52 53 276 278 44 281 32 283 285 287 289 291 293 97 296 98 299 301 "
        "303 305 307 309 311 375 316 318 32"
    ),
    ("minicpm5",): ids(
        "73 321 385 267 269 332 274 276 278 341 32 406 529 293 97 296 98 299 301 303 305 307 432 375 439 32"
    ),
    ("deepseek-llm",): ids(
        "73 39 261 263 265 39 116 269 271 334 276 278 44 10 10 32 283 285 287 289 291 293 97 296 98 32 300 "
        "302 304 368 309 13 10 375 316 318 32"
    ),
    ("deepseek-coder",): ids(
        "73 39 261 263 265 39 116 269 49 50 51 52 53 276 278 44 10 10 32 283 285 287 289 291 293 97 296 98 32 "
        "300 302 304 368 309 13 10 375 316 318 32"
    ),
    ("deepseek-v3",): ids(
        "73 321 263 265 267 269 332 274 276 278 341 32 283 285 287 289 291 293 97 296 98 32 300 302 304 368 "
        "309 311 375 316 318 32"
    ),
    ("falcon", "default"): ids(
        "73 39 261 263 265 39 116 32 32 332 274 276 278 44 342 283 285 287 289 291 32 95 97 296 98 299 301 "
        "303 305 307 309 13 10 375 316 318 32"
    ),
}
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


@pytest.mark.parametrize(("pre", "ids"), [(pre, ids) for names, ids in EXPECTED.items() for pre in names])
def test_a_text_is_cut_where_llama_cpp_cuts_it(pre: str, ids: list[int], tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "model.gguf", "gpt2", pre, byte_level_fields())
    tokenizer = make_tokenizer(file)
    assert tokenizer.encode(TEXT, add_special_tokens=False).ids == ids
    assert tokenizer.decode(ids) == TEXT


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
        ("gpt2", "qwen", "tokenizer.ggml.pre='qwen' is not supported; did you mean 'qwen2'?; set model.tokenizer to a"),
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
