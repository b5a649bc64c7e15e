"""Compiles structured outputs to llguidance matchers, which compute the allowed next tokens."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..conf.errors import ConfigError
from ..conf.sampling import SamplingParams
from ..conf.structured_outputs import StructuredOutputs
from .tokenizer import ByteTokenizer, Detokenizer, FileTokenizer, Tokenizer

if TYPE_CHECKING:
    import llguidance
    from llguidance._lib import JsonCompileOptions

MOST_COMPILED = 64  # cached grammars
_MOST_SEARCHED = 100  # output prefixes that `admits` tries
_LONGEST_ERROR = 300  # characters
_ONE_OF = (  # llguidance's message names an option that requests do not have
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "oneOf: its branches may overlap, which cannot be enforced; use anyOf",
)
_SPECIAL = b"\xff"  # llguidance's prefix of special tokens


class Grammars:
    """Compiles structured outputs for one model. Thread-safe.

    Args:
        vocab_size: V of the model, which may have more ids than the tokenizer.
        eos_token_ids: the tokens that end an output, allowed once the text is complete.

    Raises:
        ConfigError: the model has no tokenizer or no end-of-sequence token, or the tokenizer is of an unknown kind.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self._as_guidance = _make_tokenizer(tokenizer, vocab_size, eos_token_ids)
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputs, llguidance.LLMatcher] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        """The number of tokens in a mask: at least V."""
        return self._as_guidance.vocab_size

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for an output, including special tokens."""
        return Detokenizer(self.tokenizer, skip_special=False)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text within an output, without added special tokens."""
        return self.tokenizer.encode(text, add_special=False)

    def matcher(self, wanted: StructuredOutputs) -> llguidance.LLMatcher:
        """Return a matcher in its initial state.

        Raises:
            ConfigError: the schema, expression or grammar is invalid, or too complex, or no text matches it.
        """
        import llguidance

        with self._lock:
            compiled = self._compiled.get(wanted)
        if compiled is None:
            limits = llguidance.LLParserLimits(verbose_errors=False)
            compiled = llguidance.LLMatcher(self._as_guidance, _grammar(wanted), log_level=0, limits=limits)
            if compiled.is_error():
                raise _invalid(wanted, compiled.get_error())
            start = compiled.deep_copy()
            start.compute_bitmask()
            if start.is_error():
                raise _invalid(wanted, "no text matches it, or its first token is too complex to find")
        with self._lock:
            self._compiled[wanted] = compiled
            self._compiled.move_to_end(wanted)
            if len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def check(self, wanted: StructuredOutputs) -> None:
        """Compile structured outputs, like `matcher`."""
        self.matcher(wanted)

    def admits(self, wanted: StructuredOutputs, params: SamplingParams) -> bool:
        """Return whether some output can match within the other limits of `params`; true if the search takes too long.

        Searches token by token for a complete output.

        Raises:
            ConfigError: see `matcher`.
        """
        least = 0 if wanted.after or params.reasoning is not None else params.min_tokens
        matcher, output, ends = self.matcher(wanted), list[int](), self._eos_token_ids
        if not params.limits:
            return True
        may = np.zeros(len(matcher.compute_bitmask()) * 8, dtype=bool)
        may[slice(None) if params.allowed_token_ids is None else list(params.allowed_token_ids)] = True
        branches: list[tuple[llguidance.LLMatcher, list[int], Iterator[int]]] = []
        for _ in range(_MOST_SEARCHED):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if matcher.is_error():
                return True  # too complex: the engine reports it if generation reaches this state
            found = np.unpackbits(bits, bitorder="little").astype(bool) & may
            out = [ids[-1] for ids in params.bad_words_ids if list(ids[:-1]) == output[len(output) - len(ids) + 1 :]]
            found[out] = False
            if found[ends].any() and len(output) >= least:
                return True
            found[ends] = False
            branches.append((matcher, output, iter(np.flatnonzero(found).tolist())))
            while branches and (token := next(branches[-1][2], None)) is None:
                branches.pop()
            if not branches:
                return False
            assert token is not None
            matcher, output = branches[-1][0].deep_copy(), [*branches[-1][1], token]
            matcher.consume_token(token)
        return True


def _make_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    import llguidance

    known = vocab_size if isinstance(tokenizer, ByteTokenizer) else tokenizer.vocab_size
    eos = [token for token in eos_token_ids if token < known]
    if not isinstance(tokenizer, ByteTokenizer | FileTokenizer):
        raise ConfigError("sampling.structured_outputs: the model has no tokenizer (model.tokenizer=none)")
    if not eos:
        raise ConfigError("sampling.structured_outputs: the model names no end-of-sequence token, which must end them")
    try:
        if isinstance(tokenizer, ByteTokenizer):
            return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(vocab_size, eos)), eos_token=eos)
        return llguidance.LLTokenizer(tokenizer.json, n_vocab=max(vocab_size, known), eos_token=eos)
    except ValueError as error:
        raise ConfigError(f"sampling.structured_outputs: unsupported tokenizer ({_line(str(error))})") from error


class _Bytes:
    """A UTF-8 byte tokenizer in llguidance's interface. Ids above 255 have no text."""

    bos_token_id = None

    def __init__(self, vocab_size: int, eos: Sequence[int]) -> None:
        self.eos_token_id = eos[0]
        self.special_token_ids = list(eos)
        self.tokens = [bytes((i,)) if i < 256 else b"" for i in range(vocab_size)]
        for token in eos:
            self.tokens[token] = _SPECIAL + b"<eos%d>" % token

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _grammar(wanted: StructuredOutputs) -> str:
    """Convert structured outputs to an llguidance grammar.

    Raises:
        ConfigError: the grammar is invalid.
    """
    import llguidance

    try:
        if wanted.schema is not None:
            options: JsonCompileOptions = {"whitespace_flexible": not wanted.disable_any_whitespace}
            if wanted.whitespace_pattern is not None:
                options["whitespace_pattern"] = wanted.whitespace_pattern
            return llguidance.LLMatcher.grammar_from_json_schema(wanted.schema, defaults=options)
        if wanted.regex is not None:
            return llguidance.grammar_from("regex", wanted.regex)
        if wanted.choice:
            # One terminal with all texts compiles several times faster than a rule with one terminal per text.
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
            return llguidance.grammar_from("grammar", f"start: CHOICE\nCHOICE: {texts}")
        assert wanted.grammar is not None
        return llguidance.grammar_from("grammar", wanted.grammar)
    except ValueError as error:
        raise _invalid(wanted, str(error)) from error


def _invalid(wanted: StructuredOutputs, error: str) -> ConfigError:
    return ConfigError(f"sampling.structured_outputs.{wanted.kind}: {_line(error)}")


def _line(text: str) -> str:
    """Return a text on one line, truncated."""
    text = " ".join(text.split()).replace(*_ONE_OF)
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]} …"
