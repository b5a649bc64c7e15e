"""Makes the tokenizer of a Hugging Face folder, with what lies beside its vocabulary, by the rules of transformers 5.

Source: `_from_pretrained` of `tokenization_utils_base.py` and `TokenizersBackend` in transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..conf.errors import ConfigError
from .json_file import read_if_there, refuse_pointer

if TYPE_CHECKING:
    import tokenizers

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = {"content", "single_word", "lstrip", "rstrip", "normalized", "special"}  # of an added token
# How Qwen2 splits a text: each digit alone.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_tokenizer(folder: Path, file: Path) -> tuple[tokenizers.Tokenizer, list[str]]:
    """Return a folder's tokenizer, and the text of its end-of-sequence token if it names one.

    Args:
        folder: has `vocab.json` and `merges.txt` if there is no `file`, and may have `tokenizer_config.json`,
            `special_tokens_map.json` and `added_tokens.json`.
        file: a `tokenizer.json`, which may be missing.

    Raises:
        ConfigError: a file cannot be read, or says what is not supported.
    """
    from tokenizers import Tokenizer  # imported here since it takes a tenth of a second

    settings = _read(folder / "tokenizer_config.json")
    if settings.get("split_special_tokens"):
        raise ConfigError(f"model.tokenizer={folder}: split_special_tokens=true is not supported")
    if file.is_file():
        refuse_pointer(file)
        try:
            inner = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare exceptions
            raise ConfigError(f"model.tokenizer={file}: not a tokenizer.json ({error})") from error
        _check_prefix_space(inner, settings, folder)
    else:
        inner = _byte_level(folder, settings)
    named = _add_tokens(inner, folder, settings)
    if not file.is_file():
        _set_ends(inner, settings, named)
    return inner, [named["eos_token"]] if "eos_token" in named else []


def _read(file: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one where there is no file."""
    try:
        return read_if_there(file)
    except ConfigError as error:
        raise ConfigError(f"model.tokenizer={error}") from error


def _byte_level(folder: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """Make a byte-level BPE tokenizer from `vocab.json` and `merges.txt`, which splits texts as GPT-2 or Qwen2 does."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    for file in (vocab, merges):
        refuse_pointer(file)
    try:
        inner = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:
        raise ConfigError(f"model.tokenizer={folder}: vocab.json or merges.txt cannot be read ({error})") from error
    config = _read(folder / "config.json")
    kind = str(settings.get("tokenizer_class") or config.get("tokenizer_class") or config.get("model_type") or "gpt2")
    space = bool(settings.get("add_prefix_space", False))
    inner.decoder = decoders.ByteLevel()
    if kind in ("gpt2", "GPT2Tokenizer", "GPT2TokenizerFast"):
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    elif kind in ("qwen2", "qwen3", "Qwen2Tokenizer", "Qwen2TokenizerFast"):
        inner.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)]
        )
    else:
        raise ConfigError(
            f"model.tokenizer={folder}: vocab.json and merges.txt of {kind}, which splits texts in its own way; save "
            "them as tokenizer.json, once, with transformers: "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
        )
    end = "<|endoftext|>"  # of both, where no file names others
    if inner.token_to_id(end) is not None:
        inner.add_special_tokens([end])
    return inner


def _check_prefix_space(inner: tokenizers.Tokenizer, settings: dict[str, Any], folder: Path) -> None:
    """Refuse an `add_prefix_space` that contradicts the tokenizer.json's byte level."""
    wanted = settings.get("add_prefix_space")
    state = json.loads(inner.pre_tokenizer.__getstate__()) if inner.pre_tokenizer is not None else {}
    for part in state.get("pretokenizers", [state]):
        if part.get("type") == "ByteLevel" and wanted not in (None, part["add_prefix_space"]):
            raise ConfigError(f"model.tokenizer={folder}: add_prefix_space={wanted}: tokenizer.json says otherwise")


def _add_tokens(inner: tokenizers.Tokenizer, folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Add the tokens that the files beside the vocabulary name, and return the text of each special one by its role."""
    from tokenizers import AddedToken

    where = f"model.tokenizer={folder}"
    decoder = settings.get("added_tokens_decoder")
    roles = settings if decoder is not None else settings | _read(folder / "special_tokens_map.json")

    def text(value: Any) -> str:
        found = value.get("content") if isinstance(value, dict) else value
        if not isinstance(found, str):
            raise ConfigError(f"{where}: the special token {value!r} must be a text, or an object with its content")
        return found

    named = {role: text(roles[role]) for role in _NAMED if roles.get(role)}
    extra = [roles[key] for key in ("additional_special_tokens", "extra_special_tokens") if roles.get(key)]
    listed = [each for values in extra for each in (values.values() if isinstance(values, dict) else values)]
    special = dict.fromkeys([*named.values(), *map(text, listed)])
    try:
        if decoder is not None:
            kept = {int(i): {k: v for k, v in flags.items() if k in _FLAGS} for i, flags in decoder.items()}
            added = {index: AddedToken(**flags) for index, flags in kept.items()}
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
    inner.add_special_tokens([token for token in special if token not in _added(inner)])
    return named


def _added(inner: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in inner.get_added_tokens_decoder().values()}


def _set_ends(inner: tokenizers.Tokenizer, settings: dict[str, Any], named: dict[str, str]) -> None:
    """Let the tokenizer add `bos_token` and `eos_token` to a text where `tokenizer_config.json` says so.

    A tokenizer.json says itself what is added.
    """
    from tokenizers import processors

    keys = ("add_bos_token", "add_eos_token")
    bos, eos = ((named.get(key[4:]) if settings.get(key) else None) for key in keys)
    parts = ([f"{bos}:0"] if bos else []), ([f"{eos}:0"] if eos else [])
    ends = [(token, inner.token_to_id(token)) for token in (bos, eos) if token]
    single = [*parts[0], "$A:0", *parts[1]]
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
