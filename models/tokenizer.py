"""Converts text to token ids and back, by a `tokenizer.json` (through the `tokenizers` library) or as UTF-8 bytes.

Ids match `transformers` for the same file. The file's post-processor may add special tokens, such as BOS. The text of a
special token in a prompt is encoded as its id.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..conf.errors import ConfigError
from ..conf.user_path import user_path
from .gguf.file import open_gguf
from .tokenizer_folder import read_tokenizer

if TYPE_CHECKING:
    import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoded from incomplete or invalid UTF-8
_NUM_BYTES = 256
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Base class of tokenizers. By itself it encodes no text, and decodes tokens to no text.

    Args:
        vocab_size: all ids are below it.

    Attributes:
        eos_token_ids: from the tokenizer's own files; the checkpoint may have more.
        has_byte_runs: whether invalid UTF-8 bytes change the text of adjacent bytes.
    """

    eos_token_ids: tuple[int, ...] = ()
    has_byte_runs = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the token ids of a prompt. `add_special`: let the tokenizer add special tokens.

        Raises:
            ConfigError: an id is outside the model's vocabulary, since tokenizer and weights do not match.
        """
        raise ConfigError("model.tokenizer=none: prompts must be token ids; set model.tokenizer for text")

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of token ids. Unknown ids are skipped."""
        return ""

    def token_bytes(self, token: int) -> bytes | None:
        """Return the UTF-8 bytes that a token adds to the text; None if they depend on its neighbours."""
        return b""

    def is_partial(self, token: int) -> bool:
        """Return whether later tokens may change the text of this token."""
        return False

    def is_silent(self, token: int, skip_special: bool = True) -> bool:
        """Return whether `decode` skips this token: it is unknown to the tokenizer, or special."""
        return True


class NoTokenizer(Tokenizer):
    """A tokenizer for models that are used with token ids only."""


class ByteTokenizer(Tokenizer):
    """A tokenizer for models without one: ids 0 to 255 are UTF-8 bytes. Other ids decode to no text.

    Raises:
        ConfigError: the model's vocabulary is smaller than 256.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        if vocab_size < _NUM_BYTES:
            raise ConfigError(
                f"model.architecture.vocab_size={vocab_size}: must be {_NUM_BYTES} or more without a tokenizer "
                "(prompts are UTF-8 bytes then); or set model.tokenizer"
            )

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the UTF-8 bytes of the text; there are no special tokens."""
        return list(_valid(text).encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of the bytes; invalid UTF-8 becomes replacement characters."""
        return bytes(i for i in ids if i < _NUM_BYTES).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the token's byte; empty for an id above 255."""
        return bytes((token,)) if token < _NUM_BYTES else b""

    def is_partial(self, token: int) -> bool:
        """Return whether the byte is part of a multi-byte character."""
        return 0x80 <= token < _NUM_BYTES

    def is_silent(self, token: int, skip_special: bool = True) -> bool:
        """Return whether the id is above 255."""
        return token >= _NUM_BYTES


class FileTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    Args:
        inner: the library's tokenizer.
        arch_vocab_size: the model's vocabulary size, which may differ from the tokenizer's.
        eos_tokens: the texts of the end-of-sequence tokens.
        source: the config's `model.tokenizer`, for errors.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, arch_vocab_size: int, eos_tokens: Sequence[str] = (), source: str = ""
    ) -> None:
        super().__init__(max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._source = source
        self._arch_vocab_size = arch_vocab_size
        self._special = frozenset(i for i, t in inner.get_added_tokens_decoder().items() if t.special)
        kinds = _decoder_kinds(inner)
        self._byte_level = _byte_level_table() if kinds == ["ByteLevel"] else None
        self.has_byte_runs = "ByteFallback" in kinds
        ids = (inner.token_to_id(token) for token in eos_tokens)
        self.eos_token_ids = tuple(dict.fromkeys(i for i in ids if i is not None))

    @property
    def json(self) -> str:
        """The text of its `tokenizer.json`."""
        text: str = self._inner.to_str()
        return text

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """See `Tokenizer.encode`. Releases the GIL, unlike the library's `encode`."""
        ids: list[int] = self._inner.encode_batch_fast([_valid(text)], add_special_tokens=add_special)[0].ids
        if ids and (largest := max(ids)) >= self._arch_vocab_size:
            raise ConfigError(
                f"model.tokenizer={self._source}: token {self._inner.id_to_token(largest)!r} has id {largest}, but the "
                f"model's vocabulary ends at {self._arch_vocab_size - 1}; use the tokenizer that came with the weights"
            )
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """See `Tokenizer.decode`."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token: int) -> bytes | None:
        """See `Tokenizer.token_bytes`. Known for byte-level tokenizers and byte-fallback tokens such as `<0xE2>`."""
        content = self._inner.id_to_token(token) or ""
        if self._byte_level is None:
            is_byte = self.has_byte_runs and _BYTE.fullmatch(content)
            return bytes.fromhex(content[3:5]) if is_byte else None
        try:
            return bytes(self._byte_level[c] for c in content)
        except KeyError:  # an added token with a character outside the byte alphabet is its own text
            return content.encode()

    def is_partial(self, token: int) -> bool:
        """See `Tokenizer.is_partial`."""
        if self.has_byte_runs and self.token_bytes(token) is not None:
            return True
        return self.decode([token], skip_special=False).endswith(_REPLACEMENT)

    def is_silent(self, token: int, skip_special: bool = True) -> bool:
        """See `Tokenizer.is_silent`."""
        return (skip_special and token in self._special) or self._inner.id_to_token(token) is None


def load_tokenizer(source: str | Path | None, arch_vocab_size: int) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder, a `tokenizer.json` or a GGUF file.

    A folder may contain `vocab.json` and `merges.txt` of GPT-2 or Qwen2 instead. A `source` of None means
    `ByteTokenizer`, "none" means `NoTokenizer`.

    Raises:
        ConfigError: there is no readable tokenizer, or the vocabulary is too small for bytes.
    """
    if source is None:
        return ByteTokenizer(arch_vocab_size)
    if source == "none":
        return NoTokenizer(arch_vocab_size)
    path = user_path(source, "model.tokenizer")
    if not path.exists():
        raise ConfigError(f"model.tokenizer={source}: no such file or folder; give a folder with tokenizer.json")
    if path.is_file() and path.suffix == ".gguf":
        from .gguf.tokenizer import make_tokenizer, special_tokens

        of_file = open_gguf(path)
        ends = special_tokens(of_file).get("eos_token")
        return FileTokenizer(make_tokenizer(of_file), arch_vocab_size, [ends] if ends else [], str(source))
    folder, file = (path, path / "tokenizer.json") if path.is_dir() else (path.parent, path)
    if not file.is_file() and not ((folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()):
        legacy = (
            "holds a legacy tokenizer.model; convert it once with transformers: "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
            if (folder / "tokenizer.model").is_file()
            else "holds no tokenizer.json; set model.tokenizer to a folder or file that does, or to none for token ids"
        )
        raise ConfigError(f"model.tokenizer={folder}: {legacy}")
    inner, eos_tokens = read_tokenizer(folder, file)
    return FileTokenizer(inner, arch_vocab_size, eos_tokens, str(source))


def _valid(text: str) -> str:
    """Replace lone surrogates by "?": a JSON string can contain them, but UTF-8 cannot encode them."""
    return text.encode("utf-8", errors="replace").decode()


def _decoder_kinds(inner: tokenizers.Tokenizer) -> list[str]:
    """Return the types of a tokenizer's decoders in order, with nested sequences flattened."""

    def flat(state: dict[str, Any]) -> list[str]:
        if state["type"] == "Sequence":
            return [kind for part in state["decoders"] for kind in flat(part)]
        return [state["type"]]

    return flat(json.loads(inner.decoder.__getstate__())) if inner.decoder is not None else []


def _byte_level_table() -> dict[str, int]:
    """Return the byte of each character in GPT-2's byte alphabet.

    A byte is represented by its Latin-1 character if that is printable. The other bytes are represented by characters
    starting at U+0100.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(_NUM_BYTES) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class Detokenizer:
    """Incremental detokenizer of one request. `push` returns text that no later token changes, `flush` the rest.

    The concatenated results of `push` and `flush` equal the `decode` of all tokens. Byte-level tokenizers decode token
    by token. Others decode a window: the tokens whose text was returned last, then the tokens whose text is not final.
    The former are needed since a decoder may drop a space at the start of a text. A run of byte-fallback tokens is
    held back until it ends, since one invalid byte turns the whole run into replacement characters.

    Args:
        tokenizer: the model's tokenizer.
        skip_special: omit special tokens from the text.
        shown: special tokens to keep regardless.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, shown: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = frozenset(shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._window: list[int] = []
        self._num_final = 0  # tokens of the window whose text was returned
        self._final_text = ""  # decode(window[:num_final])

    def push(self, token: int) -> str:
        """Add a token and return the text that it makes final: often a word, sometimes nothing."""
        tokenizer = self._tokenizer
        if tokenizer.is_silent(token, self._skip_special and token not in self._shown):
            return ""
        if not tokenizer.has_byte_runs and (raw := tokenizer.token_bytes(token)) is not None:
            return self._utf8.decode(raw)
        self._window.append(token)
        return "" if tokenizer.is_partial(token) else self._advance()

    def flush(self) -> str:
        """Return the remaining text. No token may follow."""
        return self._utf8.decode(b"", final=True) + self._advance()

    def _advance(self) -> str:
        text = self._tokenizer.decode(self._window, skip_special=False)
        new = text[len(self._final_text) :]
        if new:
            self._window = self._window[self._num_final :]
            self._num_final = len(self._window)
            self._final_text = self._tokenizer.decode(self._window, skip_special=False)
        return new
