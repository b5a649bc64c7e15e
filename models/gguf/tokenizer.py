"""Makes a tokenizer of the `tokenizers` library from the fields of a GGUF file.

Sources: the tokenizer.json files of the models that the names in `tokenizer.ggml.pre` stand for, and for SentencePiece
the conversion that `transformers` documents: merges follow from the vocabulary, in the order of the pieces' scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...conf.errors import ConfigError, nearest
from .file import GgufFile

if TYPE_CHECKING:
    import tokenizers

_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2  # kinds of tokens
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = ("gpt-2", "gpt2", "default")
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r")
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _WORDS + r"\p{N}{1,3}" + _REST),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _WORDS + r"\p{N}" + _REST),
    "tekken": _TEKKEN,
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word that is a token is not built by merges
_BEGINS_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # where the file does not say


def make_tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    """Make the tokenizer that the file describes, with its special tokens and the BOS that it puts before a text.

    Raises:
        ConfigError: a kind of tokenizer that is not supported, or a field that is missing or does not fit.
    """
    kind = file.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model={kind!r} is not supported (supported: gpt2, llama); set "
            "model.tokenizer to a folder with tokenizer.json"
        )
    tokens, kinds = _tokens(file)
    pre = str(file.get("tokenizer.ggml.pre", "default"))
    try:
        inner = _byte_level(file, tokens, pre) if kind == "gpt2" else _sentence_piece(file, tokens)
        _add_special_tokens(inner, tokens, kinds)
        if file.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _BEGINS_WITH_BOS):
            _begin_with(inner, file, tokens)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(f"{file.path}: its tokenizer cannot be read ({error})") from error
    return inner


def special_tokens(file: GgufFile) -> dict[str, str]:
    """Return the texts of the file's special tokens under the names of a chat template, as `bos_token`."""
    tokens, _ = _tokens(file)
    ids = {name: file.get(f"tokenizer.ggml.{field}_token_id") for name, field in _TEMPLATE_NAMES.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}


_TEMPLATE_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    tokens = file.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ConfigError(f"{file.path}: the field tokenizer.ggml.tokens is missing; set model.tokenizer")
    kinds = file.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise ConfigError(f"{file.path}: tokenizer.ggml.token_type has {len(kinds)} values for {len(tokens)} tokens")
    return tokens, kinds


def _byte_level(file: GgufFile, tokens: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    by_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _GPT2:
        inner.pre_tokenizer = by_words
    elif pre in _DIGITS_ALONE:
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_words])
    elif pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    else:
        known = (*_GPT2, *_DIGITS_ALONE, *_SPLITS)
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre={pre!r} is not supported{nearest(pre, known)}; set model.tokenizer to a "
            "folder with tokenizer.json"
        )
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    return inner


def _sentence_piece(file: GgufFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise ConfigError(f"{file.path}: tokenizer.ggml.scores has {len(scores)} values for {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    inner = Tokenizer(
        models.BPE(vocab, _merges(vocab, scores), unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    starts: list[Any] = [normalizers.Replace(" ", _SPACE)]
    ends: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        starts.insert(0, normalizers.Prepend(_SPACE))
        ends.append(decoders.Strip(" ", 1, 0))
    inner.normalizer, inner.decoder = normalizers.Sequence(starts), decoders.Sequence(ends)
    return inner


def _merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece: the pieces by falling score, the pairs of each by their ids."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(vocab, key=lambda piece: scores[vocab[piece]], reverse=True):
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges


def _add_special_tokens(inner: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    from tokenizers import AddedToken

    inner.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
        ]
    )


def _begin_with(inner: tokenizers.Tokenizer, file: GgufFile, tokens: Sequence[str]) -> None:
    from tokenizers import processors

    bos = file.get("tokenizer.ggml.bos_token_id")
    if bos is None or not 0 <= bos < len(tokens):
        raise ConfigError(f"{file.path}: tokenizer.ggml.bos_token_id={bos}: must be a token")
    inner.post_processor = processors.TemplateProcessing(
        single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
    )
