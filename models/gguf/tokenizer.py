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
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(ends: str = "", but: str = "") -> str:
    """Return the expression of words, in which a capital begins a new one after small letters."""
    start, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return f"{start}{upper}*{lower}+{ends}|{start}{upper}+{lower}*{ends}|"


_GPT4O = _cased(f"{_ENDS}?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_CASED_OF_DEEPSEEK = (  # letters of two cases, but for scripts that DeepSeek's list leaves out
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8A}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}"
    r"\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF2A}]]+"
)
_ASIAN = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
# A text is cut by the first expression, each piece by the next, and so on.
_CUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "exaone4", "gigachat", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_WORDS + r"\p{N}" + _REST,)),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), (_GPT4O,)),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O),
    "tekken": (_cased() + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES,),
    "kimi-k2": (r"\p{Han}+|" + _cased(f"{_ENDS}?", r"&&[^\p{Han}]") + r"\p{N}{1,3}" + _REST,),
    "seed-coder": (_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES,),
    "minicpm5": (r"\p{N}{1,3}", _WORDS + r"\p{N}+" + _REST),
    "deepseek-llm": (
        *(r"[\r\n]", r"\s?" + _CASED_OF_DEEPSEEK),
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        *(r"\s+$", _ASIAN, r"\p{N}+"),
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"),
    "deepseek-v3": (
        *(r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"),
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
    ),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_BEGINS_WITH_BOS = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "pixtral",
    "midm-2.0",
    "tekken",
)  # if the file is mute
_WHOLE_WORDS_FIRST = (*_BEGINS_WITH_BOS, "glm4", "minicpm5")  # a word that is a token is not built by merges


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
    if pre not in _CUTS:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre={pre!r} is not supported{nearest(pre, _CUTS)}; set model.tokenizer to a "
            "folder with tokenizer.json"
        )
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUTS[pre]]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of])
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
