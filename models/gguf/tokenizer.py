"""Builds a tokenizer of the `tokenizers` library from GGUF fields.

Token ids match llama.cpp; see `splits.py` for byte-level vocabularies. For SentencePiece, merges are derived from the
vocabulary in score order, as in the conversion that `transformers` documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...conf.errors import ConfigError
from .file import GgufFile
from .pre_tokenizers import BEGINS_WITH_BOS, SPLITS, WHOLE_WORDS_FIRST

if TYPE_CHECKING:
    import tokenizers

_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2  # kinds of tokens
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def make_tokenizer(file: GgufFile) -> tokenizers.Tokenizer:
    """Make the file's tokenizer, with its special tokens and automatic BOS and EOS.

    Raises:
        ConfigError: the tokenizer type is not supported, or a field is missing or inconsistent.
    """
    kind = file.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model={kind!r} is not supported (supported: gpt2, llama); set "
            "model.tokenizer to a folder with tokenizer.json"
        )
    tokens, kinds = _tokens(file)
    pre = str(file.get("tokenizer.ggml.pre") or "default")
    try:
        inner = _byte_level(file, tokens, pre) if kind == "gpt2" else _sentence_piece(file, tokens)
        _add_special_tokens(inner, tokens, kinds)
        begins = file.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in BEGINS_WITH_BOS)
        _set_ends(inner, file, tokens, begins, file.get("tokenizer.ggml.add_eos_token", False))
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(f"{file.path}: its tokenizer cannot be read ({error})") from error
    return inner


def special_tokens(file: GgufFile) -> dict[str, str]:
    """Return the file's special tokens under their chat-template names, such as `bos_token`."""
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
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in WHOLE_WORDS_FIRST))
    if pre not in SPLITS:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre={pre!r} is not supported; set model.tokenizer to a folder with "
            "tokenizer.json"
        )
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in SPLITS[pre]]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of])
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
    """Return all merges, ordered by the merged piece's falling score, then by the pair's ids."""
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


def _set_ends(inner: tokenizers.Tokenizer, file: GgufFile, tokens: Sequence[str], begins: bool, ends: bool) -> None:
    """Add BOS and EOS automatically if the file asks for them; missing ids default to llama.cpp's."""
    from tokenizers import processors

    def token(role: str, usual: int) -> int:
        found = file.get(field := f"tokenizer.ggml.{role}_token_id", usual)
        if not 0 <= found < len(tokens):
            raise ConfigError(f"{file.path}: {field}={found}: must be a token")
        return int(found)

    of_spm = file.get("tokenizer.ggml.model") == "llama"
    bos = [token("bos", 1 if of_spm else 11)] if begins else []
    eos = [token("eos", 2 if of_spm else 11)] if ends else []
    if bos or eos:
        before, after = ([tokens[i] for i in ids] for ids in (bos, eos))
        inner.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[(tokens[i], i) for i in dict.fromkeys(bos + eos)],
        )
