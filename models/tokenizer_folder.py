"""Builds the tokenizer of a Hugging Face folder from all its files, by the rules of transformers 5.

Source: `_from_pretrained` of `tokenization_utils_base.py` and `TokenizersBackend` in transformers.
"""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..conf.errors import ConfigError
from .json_file import read_if_there, refuse_pointer

if TYPE_CHECKING:
    import tokenizers

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_FLAGS = {"content", "single_word", "lstrip", "rstrip", "normalized", "special"}  # of an added token
_LLAMA = ("LlamaTokenizer", "CodeLlamaTokenizer")
_ENDS = {  # default bos_token and eos_token of tokenizer classes
    **dict.fromkeys(_LLAMA, ("<s>", "</s>")),
    **dict.fromkeys(("GPT2Tokenizer", "GPTNeoXTokenizer"), ("<|endoftext|>", "<|endoftext|>")),
    "Qwen2Tokenizer": ("", "<|endoftext|>"),
    "GemmaTokenizer": ("<bos>", "<eos>"),
    "CohereTokenizer": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
}
_LLAMA_TYPES = ("llama", "minicpm")  # model types; for others with these classes, transformers uses the tokenizer.json
# Qwen2's pre-tokenizer: splits each digit.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_tokenizer(folder: Path, file: Path) -> tuple[tokenizers.Tokenizer, list[str]]:
    """Return a folder's tokenizer, and the text of its end-of-sequence token if it has one.

    Args:
        folder: has `vocab.json` and `merges.txt` if there is no `file`, and may have `tokenizer_config.json`,
            `special_tokens_map.json` and `added_tokens.json`.
        file: a `tokenizer.json`, which may be missing.

    Raises:
        ConfigError: a file cannot be read, or has an unsupported setting.
    """
    from tokenizers import Tokenizer  # imported here since the import takes 0.1 s

    settings, config = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    kind = str(settings.get("tokenizer_class") or config.get("tokenizer_class") or config.get("model_type") or "gpt2")
    kind = kind.removesuffix("Fast")
    if settings.get("split_special_tokens"):
        raise ConfigError(f"model.tokenizer={folder}: split_special_tokens=true is not supported")
    if file.is_file():
        refuse_pointer(file)
        try:
            inner = Tokenizer.from_buffer(file.read_bytes().removeprefix(codecs.BOM_UTF8))
        except Exception as error:  # the library raises bare exceptions
            raise ConfigError(f"model.tokenizer={file}: not a tokenizer.json ({error})") from error
        _check_prefix_space(inner, settings, folder)
        _as_llama(inner, settings, kind, config.get("model_type", "llama"))
    else:
        inner = _byte_level(folder, settings, kind)
    ends = zip(_NAMED, _ENDS.get(kind, ()), strict=False)
    own = {role: end for role, end in ends if inner.token_to_id(end) is not None}
    named = _add_tokens(inner, folder, own | settings)
    if not file.is_file() or kind == _LLAMA[1]:
        _set_ends(inner, settings if kind != _LLAMA[1] else {"add_bos_token": True}, named)
    return inner, [named["eos_token"]] if "eos_token" in named else []


def _read(file: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no file."""
    try:
        return read_if_there(file)
    except ConfigError as error:
        raise ConfigError(f"model.tokenizer={error}") from error


def _byte_level(folder: Path, settings: dict[str, Any], kind: str) -> tokenizers.Tokenizer:
    """Make a byte-level BPE tokenizer from `vocab.json` and `merges.txt`, with GPT-2's or Qwen2's pre-tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    for file in (vocab, merges):
        refuse_pointer(file)
    try:
        lines = merges.read_text(encoding="utf-8-sig").split("\n")
        pairs = [(a, b) for a, b in (line.split() for line in lines if line and not line.startswith("#version"))]
        inner = Tokenizer(models.BPE(_read(vocab), pairs))
    except Exception as error:
        raise ConfigError(f"model.tokenizer={folder}: vocab.json or merges.txt cannot be read ({error})") from error
    space = bool(settings.get("add_prefix_space", False))
    inner.decoder = decoders.ByteLevel()
    if kind in ("gpt2", "GPT2Tokenizer"):
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    elif kind in ("qwen2", "qwen3", "Qwen2Tokenizer"):
        inner.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)]
        )
    else:
        raise ConfigError(
            f"model.tokenizer={folder}: no tokenizer.json; vocab.json and merges.txt are enough for GPT-2 and Qwen "
            f"only, not for {kind}. Save them as tokenizer.json once, with transformers: "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
        )
    end = "<|endoftext|>"  # default of both families
    if inner.token_to_id(end) is not None:
        inner.add_special_tokens([end])
    return inner


def _check_prefix_space(inner: tokenizers.Tokenizer, settings: dict[str, Any], folder: Path) -> None:
    """Raise `ConfigError` if `add_prefix_space` contradicts the tokenizer.json's byte-level pre-tokenizer."""
    wanted = settings.get("add_prefix_space")
    state = json.loads(inner.pre_tokenizer.__getstate__()) if inner.pre_tokenizer is not None else {}
    for part in state.get("pretokenizers", [state]):
        if part.get("type") == "ByteLevel" and wanted not in (None, part["add_prefix_space"]):
            raise ConfigError(f"model.tokenizer={folder}: add_prefix_space={wanted}: contradicts tokenizer.json")


def _as_llama(inner: tokenizers.Tokenizer, settings: dict[str, Any], kind: str, model_type: str) -> None:
    """Replace pre-tokenizer and decoder like the Llama classes, which use only the vocabulary of a tokenizer.json."""
    from tokenizers import decoders, models, pre_tokenizers

    is_bytes = "ByteLevel" in str(inner.pre_tokenizer)  # Llama 3 with this class name
    if kind not in _LLAMA or model_type not in _LLAMA_TYPES or is_bytes or not isinstance(inner.model, models.BPE):
        return
    scheme = "always" if settings.get("legacy") and kind == _LLAMA[0] else "first"
    scheme = "never" if settings.get("add_prefix_space") is False else scheme
    inner.normalizer = None
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [] if scheme == "never" and kind == _LLAMA[0] else [decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])


def _add_tokens(inner: tokenizers.Tokenizer, folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Add the tokens that the config files list, and return the special tokens' texts by role."""
    from tokenizers import AddedToken

    where = f"model.tokenizer={folder}"
    decoder = settings.get("added_tokens_decoder")
    roles = settings if decoder is not None else settings | _read(folder / "special_tokens_map.json")

    def make(flags: dict[str, Any], **over: bool) -> AddedToken:
        return AddedToken(**{key: flag for key, flag in flags.items() if key in _FLAGS} | over)

    def make_special(value: Any) -> AddedToken:
        try:
            return make({"content": value} if isinstance(value, str) else value, special=True)
        except (AttributeError, TypeError, ValueError):
            what = "must be a text, or an object with its content"
            raise ConfigError(f"{where}: the special token {value!r} {what}") from None

    is_own = {role for role in roles if role.endswith("_token") and isinstance(roles[role], str | dict)}  # image_token
    named = {role: make_special(roles[role]) for role in roles if roles[role] and role in is_own.union(_NAMED)}
    older, newer, own = (roles.get(key) or () for key in _EXTRA)
    listed = [each for of in (newer or older, own) for each in (of.values() if isinstance(of, dict) else of)]
    special: dict[str, AddedToken] = {}
    for each in (*named.values(), *map(make_special, listed)):
        special.setdefault(each.content, each)
    try:
        if decoder is not None:
            added = {int(index): make(flags) for index, flags in decoder.items()}
        else:
            old = _read(folder / "added_tokens.json")
            new = {content: index for content, index in old.items() if content not in _added(inner)}
            added = {i: AddedToken(t, normalized=t not in special, special=t in special) for t, i in new.items()}
        for index, token in sorted(added.items()):
            inner.add_tokens([token])
            if (got := inner.token_to_id(token.content)) != index:
                raise ConfigError(
                    f"{where}: the added token {token.content!r} has id {index}, but the vocabulary {got}"
                )
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: added_tokens_decoder or added_tokens.json cannot be read ({error})") from error
    inner.add_special_tokens([token for content, token in special.items() if content not in _added(inner)])
    return {role: token.content for role, token in named.items()}


def _added(inner: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in inner.get_added_tokens_decoder().values()}


def _set_ends(inner: tokenizers.Tokenizer, settings: dict[str, Any], named: dict[str, str]) -> None:
    """Make the tokenizer add `bos_token` and `eos_token` to texts as set in `tokenizer_config.json`.

    Not needed with a tokenizer.json, which has its own post-processor.
    """
    from tokenizers import processors

    bos, eos = ([named[role]] if role in named and settings.get(f"add_{role}") else [] for role in _NAMED[:2])
    ends = [(token, inner.token_to_id(token)) for token in (*bos, *eos)]
    single = [*(f"{token}:0" for token in bos), "$A:0", *(f"{token}:0" for token in eos)]
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
