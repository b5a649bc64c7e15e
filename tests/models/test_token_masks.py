"""Masks of structured outputs: which tokens a grammar allows, made in a thread and applied to rows of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gapless.conf.errors import ConfigError
from gapless.conf.reasoning import Reasoning
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


def fed(masks: TokenMasks, prompt: str, output: str) -> list[set[int] | None]:
    """Return the tokens that are allowed before each byte of an output, and after it; None: all."""
    found: list[set[int] | None] = []
    tokens = [*prompt.encode(), *output.encode()]
    for place in range(len(prompt), len(tokens) + 1):
        start = 0 if place == len(prompt) else place - 1
        pending = masks.advance([(0, start, tokens[start:place])], [0])
        assert pending is not None
        (row,) = allowed(pending.result(), 1)
        found.append(None if len(row) == V else row)
    return found


def test_nothing_is_masked_before_the_text_that_begins_the_match():
    masks = bytes_masks()
    masks.add(0, StructuredOutputs(regex="ab", after="<c>"), 1)
    assert fed(masks, "x", "hi <<c>ab") == [None] * 7 + [{ord("a")}, {ord("b")}, set(EOS)]


def test_reasoning_comes_before_the_match():
    masks = bytes_masks()
    masks.add(0, StructuredOutputs(regex="ab"), 1, Reasoning(end="</t>"))
    assert fed(masks, "x", "a</</t>") == [None] * 7 + [{ord("a")}]
    masks.drop(0)
    masks.add(0, StructuredOutputs(regex="ab", after="<c>"), 1, Reasoning(begin="<t>", end="</t>"))
    assert fed(masks, "x", "\n<t><c></t><c>")[-2:] == [None, {ord("a")}]
    masks.drop(0)
    masks.add(0, StructuredOutputs(regex="ab", after="<c>"), 1, Reasoning(begin="<t>", end="</t>"))
    assert fed(masks, "x", "no <c>")[-2:] == [None, {ord("a")}]


@pytest.mark.parametrize(("begin", "text"), [("", "abc"), ("<t>", "<t>")])
def test_the_end_of_reasoning_is_written_at_its_budget(begin: str, text: str):
    masks = bytes_masks()
    masks.add(0, None, 1, Reasoning(begin=begin, end="</t>", max_tokens=3))
    assert fed(masks, "x", f"{text}</t>abc") == [None] * 3 + [{ord(c)} for c in "</t>"] + [None] * 4


def test_an_output_without_reasoning_has_no_budget():
    masks = bytes_masks()
    masks.add(0, None, 1, Reasoning(begin="<t>", end="</t>", max_tokens=0))
    assert fed(masks, "x", "no, none") == [None] * 9


def test_a_budget_beside_a_match_in_another_row():
    masks = bytes_masks()
    masks.add(3, None, 1, Reasoning(end="</t>", max_tokens=0))
    masks.add(4, StructuredOutputs(regex="a"), 1)
    pending = masks.advance([(4, 0, [5]), (3, 0, [5])], [3, 9, 4])
    assert pending is not None
    assert allowed(pending.result(), 3) == [{ord("<")}, set(range(V)), {ord("a")}]


def test_reasoning_that_may_not_come_needs_a_text_before_the_match():
    with pytest.raises(ConfigError, match=r"reasoning\.begin"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), reasoning=Reasoning(begin="<t>"))
