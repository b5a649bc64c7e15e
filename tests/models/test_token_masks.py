"""Masks of structured outputs: which tokens a grammar allows, made in a thread and applied to rows of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gapless.conf.errors import ConfigError
from gapless.conf.sampling import SamplingParams
from gapless.conf.structured_outputs import StructuredOutputs
from gapless.models.grammar import Grammars
from gapless.models.ranking import NO_TOKEN
from gapless.models.sampling import Sampler
from gapless.models.token_masks import RowMasks, TokenMasks
from gapless.models.tokenizer import ByteTokenizer, NoTokenizer

V, EOS = 300, (257, 299)


def bytes_masks() -> TokenMasks:
    return TokenMasks(lambda: Grammars(ByteTokenizer(V), V, EOS), 2)


def allowed(masks: RowMasks, num_rows: int) -> list[set[int]]:
    """Return the tokens of each row that are not masked, of a vocabulary padded as that of several ranks is."""
    logits = masks.apply(torch.zeros(num_rows, V))
    assert set(logits.unique().tolist()) <= {0.0, float("-inf")}
    return [set(np.flatnonzero(row == 0.0).tolist()) for row in logits.numpy()]


def test_a_choice_is_followed_byte_by_byte_and_then_ends():
    masks = bytes_masks()
    masks.add(7, StructuredOutputs(choice=("ü\n", 'a"', "ab")), 3)
    masks.add(9, StructuredOutputs(regex="x?"), 1)
    assert masks.advance([(7, 0, [1, 2])], []) is None
    first = masks.advance([(7, 2, [3]), (9, 0, [5])], [4, 7, 9, 5])
    assert first is not None
    everything = set(range(V))
    assert allowed(first.result(), 4) == [everything, {0xC3, ord("a")}, {ord("x"), *EOS}, everything]
    second = masks.advance([(9, 1, [ord("x")]), (7, 3, [ord("a")])], [9, 7])
    assert second is not None
    assert allowed(second.result(), 2) == [set(EOS), {ord('"'), ord("b")}]
    masks.drop(9)
    masks.drop(7)
    assert masks.is_empty
    masks.add(7, StructuredOutputs(choice=("ü\n", 'a"', "ab")), 3)  # after a preemption, with its output in a chunk
    again = masks.advance([(7, 0, [1, 2, 3, ord("a"), ord("b")])], [7])
    assert again is not None
    assert allowed(again.result(), 1) == [set(EOS)]


def test_an_output_that_can_only_end_does_so_before_min_tokens():
    sampler, masks = Sampler(V), bytes_masks()
    for number, text in enumerate(("", "a")):
        sampler.add(number, SamplingParams(min_tokens=9), 0, 1, EOS)
        masks.add(number, StructuredOutputs(regex=text), 1)
    pending = masks.advance([(0, 0, [5]), (1, 0, [5])], [0, 1])
    assert pending is not None
    logits = torch.zeros(2, V)
    logits[:, 299] = 1.0
    over, not_over = sampler.queue(logits, [0, 1], [1, 1], pending.result()).read()
    assert (over.token, not_over.token) == (299, ord("a"))


def test_a_grammar_at_its_limit_gives_no_token():
    masks = bytes_masks()
    masks.add(0, StructuredOutputs(regex="a"), 1)
    pending = masks.advance([(0, 0, [5, ord("b")])], [0])  # stands for any error of a matcher
    assert pending is not None
    sampler = Sampler(V)
    sampler.add(0, SamplingParams(), 0, 1, EOS)
    assert sampler.queue(torch.zeros(1, V), [0], [2], pending.result()).read()[0].token == NO_TOKEN


def test_what_cannot_be_loaded_is_said_when_a_mask_is_needed():
    masks = TokenMasks(lambda: Grammars(NoTokenizer(V), V, EOS), 1)
    masks.add(0, StructuredOutputs(regex="a"), 2)
    assert masks.advance([(0, 0, [5])], []) is None
    pending = masks.advance([(0, 1, [5])], [0])
    assert pending is not None
    with pytest.raises(ConfigError, match="no tokenizer"):
        pending.result()


@pytest.mark.parametrize(
    "wanted", [StructuredOutputs(json='{"$ref": "#"}'), StructuredOutputs(regex="[^\\x00-\\U0010FFFF]")]
)
def test_a_form_that_no_text_has_is_refused(wanted: StructuredOutputs):
    with pytest.raises(ConfigError, match="no text matches it"):
        Grammars(ByteTokenizer(V), V, EOS).matcher(wanted)


def test_a_model_without_an_end_is_refused():
    with pytest.raises(ConfigError, match="names no end-of-sequence token"):
        Grammars(ByteTokenizer(V), V, ())
