"""Tokenizers of several kinds encode, decode, and decode token by token."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Inner

from gapless.conf.errors import ConfigError
from gapless.models.tokenizer import Detokenizer, FileTokenizer, Tokenizer, load_tokenizer
from tests.support.tiers import examples

CORPUS = ["def f(x):\n    return x + 1\n", "naïve café — 東京 🙂", "the pipeline has no gaps, a stage never waits"] * 4
LLAMA_OWN = ("▁", "<s>", "</s>", "<unk>")  # what `llama_like` reads as something else than text
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def byte_level() -> Inner:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    return inner


def byte_level_with_added() -> Inner:
    """Return a tokenizer with added tokens, which go through the byte table where it has them: `é` is the byte E9."""
    inner = byte_level()
    inner.add_tokens([AddedToken("é x", normalized=False), AddedToken("é", normalized=False)])
    return inner


def llama_like() -> Inner:
    """BPE with byte fallback, spaces as `▁`, one prepended and stripped again; BOS by the post-processor."""
    words = ["<unk>", "<s>", "</s>", *BYTES, "▁", *"abcdefghijklmnopqrstuvwxyz.,", "▁t", "h", "he", "▁the", "▁▁"]
    vocab = {w: i for i, w in enumerate(dict.fromkeys(words))}
    inner = Inner(
        models.BPE(vocab, [("h", "e"), ("▁", "t"), ("▁t", "he"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner


def unigram() -> Inner:
    """Unigram with byte fallback and the Metaspace decoder."""
    words = ["▁", "▁the", "the", "▁a", "g", "ap", "s", "▁▁", "▁no", *"abcdefghijklmnopqrstuvwxyz"]
    pieces = [("<unk>", 0.0), *((b, -9.0) for b in BYTES), *((w, -3.0) for w in dict.fromkeys(words))]
    inner = Inner(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    inner.add_special_tokens(["</s>"])
    return inner


def metaspace_only() -> Inner:
    inner = Inner(models.Unigram([("<unk>", 0.0), ("▁", -3.0), *((c, -3.0) for c in "abc�")], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return inner


def no_decoder() -> Inner:
    return Inner(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))


KINDS = {
    "byte_level": byte_level,
    "byte_level_with_added": byte_level_with_added,
    "llama_like": llama_like,
    "unigram": unigram,
    "metaspace_only": metaspace_only,
    "no_decoder": no_decoder,
}
TOKENIZERS: dict[str, Tokenizer] = {name: FileTokenizer(build(), 4096) for name, build in KINDS.items()}
TOKENIZERS["bytes"] = load_tokenizer(None, 300)
each_kind = pytest.mark.parametrize("kind", sorted(TOKENIZERS))


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special)
    return "".join([detokenizer.push(i) for i in ids] + [detokenizer.flush()])


@each_kind
@settings(max_examples=examples(150))
@given(data=st.data(), skip_special=st.booleans())
def test_streamed_text_is_the_text_of_all_tokens(kind, data, skip_special):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 4), max_size=24))
    assert streamed(tokenizer, ids, skip_special) == tokenizer.decode(ids, skip_special)


@each_kind
@settings(max_examples=examples(100))
@given(text=st.text(max_size=40))
def test_streamed_text_of_encoded_text(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    if kind in ("byte_level", "bytes") or (kind == "llama_like" and not any(each in text for each in LLAMA_OWN)):
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["byte_level", "bytes"])
def test_every_character_comes_with_its_last_byte(kind):
    tokenizer = TOKENIZERS[kind]
    detokenizer = Detokenizer(tokenizer)
    text, given_out = "naïve 東京 🙂 é", ""
    ids = tokenizer.encode(text)
    for n, token in enumerate(ids, 1):
        given_out += detokenizer.push(token)
        assert given_out == tokenizer.decode(ids[:n]).rstrip("�")


@pytest.mark.parametrize("kind", ["llama_like", "unigram"])
def test_words_come_at_once_where_no_bytes_are_open(kind):
    tokenizer = TOKENIZERS[kind]
    detokenizer = Detokenizer(tokenizer)
    ids, given_out = tokenizer.encode("the gaps the gaps"), ""
    for n, token in enumerate(ids, 1):
        given_out += detokenizer.push(token)
        assert given_out == tokenizer.decode(ids[:n])


@each_kind
def test_the_window_does_not_grow(kind):
    """The work for a token does not depend on how many tokens came before it."""
    tokenizer, rng = TOKENIZERS[kind], random.Random(0)
    sizes = []

    class Counting:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, ids, skip_special=True):
            sizes.append(len(ids))
            return tokenizer.decode(ids, skip_special)

    words = tokenizer.encode("the a b c") * 100
    for ids in (words, [rng.choice(words) for _ in range(500)], [tokenizer.vocab_size - 1] * 500):
        detokenizer = Detokenizer(Counting())
        sizes.clear()
        for token in ids:
            detokenizer.push(token)
        assert sum(sizes) <= 8 * len(ids)


def save(inner: Inner, folder: Path) -> Path:
    inner.save(str(folder / "tokenizer.json"))
    return folder


def test_a_folder_or_its_file_and_the_eos_token(tmp_path):
    save(llama_like(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    for source in (tmp_path, str(tmp_path), tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(source, 4096)
        assert tokenizer.eos_token_ids == (2,)
        assert tokenizer.encode("the")[0] == 1  # BOS, by the post-processor
        assert tokenizer.decode(tokenizer.encode("the cat.")) == "the cat."
        assert tokenizer.encode("a</s>")[-1] == 2  # special tokens in a prompt are read as such
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert load_tokenizer(tmp_path, 4096).eos_token_ids == ()


def test_ids_are_those_of_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    for build in (byte_level, llama_like, unigram):
        inner = build()
        inner.enable_truncation(4)
        inner.enable_padding(length=6)
        folder = save(inner, tmp_path)
        theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        ours = load_tokenizer(folder, 4096)
        for text in (*CORPUS[:3], "", " two  spaces ", "the\n\tgaps</s>"):
            assert ours.encode(text) == theirs(text)["input_ids"]
            assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)


def test_vocab_and_merges_of_gpt2(tmp_path):
    inner = byte_level()
    inner.model.save(str(tmp_path))
    tokenizer = load_tokenizer(tmp_path, 4096)
    for text in CORPUS[:3]:
        assert tokenizer.encode(text) == byte_level().encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_other_threads_go_on_while_a_long_text_is_encoded():
    tokenizer, text, turns, is_over = TOKENIZERS["byte_level"], "the pipeline has no gaps. " * 40_000, 0, False

    def count():
        nonlocal turns
        while not is_over:
            turns += 1
            time.sleep(1e-4)

    thread = threading.Thread(target=count)
    thread.start()
    before = turns
    tokenizer.encode(text)
    during, is_over = turns - before, True
    thread.join()
    assert during > 10


def test_lone_surrogates_are_replaced():
    for kind in ("byte_level", "bytes"):
        tokenizer = TOKENIZERS[kind]
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no tokenizer.json"),
        ({"tokenizer.model": "x"}, "legacy tokenizer.model"),
        ({"tokenizer.json": "{bad"}, "not a tokenizer.json"),
        ({"tokenizer.json": "{}"}, "not a tokenizer.json"),
        ({"vocab.json": "{}", "merges.txt": "a b\n"}, "vocab.json or merges.txt"),
    ],
)
def test_a_bad_folder_ends_with_one_line(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_tokenizer(tmp_path, 4096)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_what_does_not_exist_or_does_not_fit_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_tokenizer(tmp_path / "nowhere", 4096)
    with pytest.raises(ConfigError, match="vocab_size=255"):
        load_tokenizer(None, 255)
    small = load_tokenizer(save(byte_level_with_added(), tmp_path), 300)
    assert max(small.encode("q")) < 300
    with pytest.raises(ConfigError, match="vocabulary ends at 299"):
        small.encode("é x")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load_tokenizer(tmp_path, 4096)
