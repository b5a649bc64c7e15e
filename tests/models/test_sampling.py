"""The sampler does the same as plain numpy, whatever else is in the batch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.sampling import SamplingParams
from gapless.models import draws as drawing
from gapless.models import ranking
from gapless.models.draws import draws_of, uniform
from gapless.models.ranking import NO_TOKEN
from gapless.models.sampling import SampledToken, Sampler
from tests.support.tiers import examples

EOS = 3


def logits_of(seed: int, rows: int, vocab: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32))


def sample_one(
    logits_V: torch.Tensor, params: SamplingParams, *, history: list[int], prompt_len: int, seed: int = 7
) -> SampledToken:
    sampler = Sampler(logits_V.shape[-1])
    sampler.add(0, params, seed, prompt_len, (EOS,))
    sampler.feed(0, 0, history)
    return sampler.sample(logits_V[None], [0], [len(history)])[0]


def penalised(logits_V: torch.Tensor, params: SamplingParams, history: list[int], prompt_len: int) -> np.ndarray:
    x = logits_V.numpy().copy()
    if params.allowed_token_ids:
        x[[i for i in range(len(x)) if i not in params.allowed_token_ids]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    for token in set(history):
        by = np.float32(params.repetition_penalty)
        x[token] = x[token] / by if x[token] > 0 else x[token] * by
    for token in set(history[prompt_len:]):
        count = history[prompt_len:].count(token)
        x[token] -= np.float32(count * params.frequency_penalty + params.presence_penalty)
    if len(history) - prompt_len < params.min_tokens:
        x[[EOS, *params.stop_token_ids]] = -np.inf
    for *others, last in params.bad_words_ids:
        if history[prompt_len:][-len(others) :] == others or not others:
            x[last] = -np.inf
    return x


def probabilities(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Apply temperature, min_p, top_k and top_p to penalised logits."""
    p = np.exp((x.astype(np.float64) - x.max()) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
    return p / p.sum()


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.5]),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2.0),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(st.integers(0, 7), max_size=2).map(tuple),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 29), st.floats(-100, 100), min_size=1, max_size=4),
    allowed_token_ids=st.sampled_from([None, None, (20, 21), (0, 5, 9, 11, 22, 23, 29)]),
    bad_words_ids=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
    logprobs=st.sampled_from([None, 0, 1, 5, 64]),
)
histories = st.lists(st.integers(0, 31), min_size=1, max_size=12) | st.lists(st.integers(0, 5), min_size=1, max_size=12)


@settings(max_examples=examples(150))
@given(params_strategy, histories, st.data(), st.integers(0, 10_000))
def test_a_token_is_the_inverse_cdf_of_a_plain_reference(params, history, data, seed):
    prompt_len = data.draw(st.integers(1, len(history)))
    logits_V = logits_of(seed, 1, 32)[0]
    got = sample_one(logits_V, params, history=history, prompt_len=prompt_len, seed=seed)
    x = penalised(logits_V, params, history, prompt_len)
    if params.is_greedy:
        assert got.token == int(x.argmax())
    else:
        p = probabilities(x, params)
        u = uniform(seed, len(history) - prompt_len)
        cdf = np.cumsum(p)
        assert p[got.token] > 0
        assert cdf[got.token] - p[got.token] - 1e-9 <= u <= cdf[got.token] + 1e-9
    if params.logprobs is None:
        assert (got.logprob, got.rank, got.top) == (None, None, [])
        return
    scores = x - x.max() - math.log(np.exp(x.astype(np.float64) - x.max()).sum())
    order = np.argsort(-x, kind="stable")
    assert got.logprob == pytest.approx(scores[got.token], abs=1e-4)
    assert got.rank == list(order).index(got.token) + 1
    finite = [int(i) for i in order[: params.logprobs] if np.isfinite(x[i])]
    assert [i for i, _ in got.top] == finite
    assert [score for _, score in got.top] == pytest.approx(list(scores[finite]), abs=1e-4)


@settings(max_examples=examples(40))
@given(
    st.lists(params_strategy, min_size=7, max_size=7),
    st.integers(0, 10_000),
    st.sampled_from([31, 32, 257, 1000, 9001]),
)
def test_a_row_alone_and_in_a_batch_are_bit_identical(params, seed, vocab):
    logits = logits_of(seed, 7, vocab)
    together = Sampler(vocab)
    history = [9, 11, 9, 13, 30]
    for r, p in enumerate(params):
        together.add(r, p, seed + r, 2, (EOS,))
        together.feed(r, 0, history)
    before = logits.clone()
    batch = together.sample(logits, list(range(7)), [5] * 7)
    assert torch.equal(logits, before)
    for r, p in enumerate(params):
        assert batch[r] == sample_one(logits[r].clone(), p, history=history, prompt_len=2, seed=seed + r)


@pytest.mark.parametrize(("penalty", "token"), [(0.5, 0), (1.0, 1), (2.0, 1), (8.0, 2)])
def test_a_repetition_penalty_counts_tokens_of_the_prompt_too(penalty: float, token: int) -> None:
    """Token 0 is in the prompt and token 1 in the output: below 1 both gain, above 1 both lose."""
    logits = torch.tensor([2.0, 2.5, 1.0, -9.0, -9.0])
    history = [0] if penalty < 1 else [0, 1]
    params = SamplingParams(repetition_penalty=penalty)
    assert sample_one(logits, params, history=history, prompt_len=1).token == token


def draws(logits_V: torch.Tensor, params: SamplingParams, n: int) -> np.ndarray:
    """Count each token over `n` requests with the seeds 0 .. n-1."""
    V = logits_V.shape[-1]
    sampler = Sampler(V)
    for seed in range(n):
        sampler.add(seed, params, seed, 4, ())
    tokens = sampler.sample(logits_V.expand(n, V), list(range(n)), [4] * n)
    return np.bincount([t.token for t in tokens], minlength=V)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(temperature=3.0, top_k=5),
        SamplingParams(temperature=1.5, min_p=0.1),
    ],
)
def test_draws_follow_the_distribution(params):
    logits_V, n = logits_of(5, 1, 12)[0], 6000
    p = probabilities(logits_V.numpy(), params)
    counts = draws(logits_V, params, n)
    assert counts[p == 0].sum() == 0
    kept = p * n >= 5
    chi2 = (((counts - p * n) ** 2)[kept] / (p * n)[kept]).sum()
    degrees = max(int(kept.sum()) - 1, 1)
    assert chi2 < degrees + 4 * math.sqrt(2 * degrees)


def test_numbers_of_one_seed_are_uniform_and_uncorrelated():
    u = np.array([[uniform(seed, i) for i in range(100)] for seed in range(60)])
    assert u.min() >= 0
    assert u.max() < 1
    assert np.histogram(u, bins=10, range=(0, 1))[0] == pytest.approx(600, abs=100)
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.05
    assert len({uniform(seed, 0) for seed in (-1, 0, 1, 2**63, 2**64 - 2)}) == 5


def test_the_number_depends_on_seed_and_output_index_only():
    logits_V, params = logits_of(1, 1, 500)[0], SamplingParams(temperature=2.0)
    short = sample_one(logits_V, params, history=[5], prompt_len=1)
    long = sample_one(logits_V, params, history=[5] * 40, prompt_len=40)
    assert short == long
    tokens = {sample_one(logits_V, params, history=[5] * n, prompt_len=1).token for n in range(1, 9)}
    assert len(tokens) > 3
    assert short != sample_one(logits_V, params, history=[5], prompt_len=1, seed=8)


def test_greedy_takes_the_lowest_id_on_ties():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    sampler = Sampler(4)
    for r in range(2):
        sampler.add(r, SamplingParams(logprobs=2), 0, 1, ())
    first, second = sampler.sample(logits, [0, 1], [1, 1])
    assert (first.token, first.rank, [i for i, _ in first.top]) == (1, 1, [1, 2])
    assert (second.token, second.rank, [i for i, _ in second.top]) == (0, 1, [0, 1])


@pytest.mark.parametrize("params", [SamplingParams(logit_bias={2: 9.0}), SamplingParams(allowed_token_ids=(2, 3))])
def test_a_greedy_request_alone_has_its_logits_edited(params):
    sampler = Sampler(4)
    sampler.add(0, params, 0, 1, ())
    assert [token.token for token in sampler.sample(torch.tensor([[5.0, 4.0, 3.0, 1.0]]), [0], [1])] == [2]


@pytest.mark.parametrize(("few", "best"), [(0, 1), (0, 512), (100, 512)])
def test_top_k_and_top_p_keep_the_lowest_ids_on_ties(few, best, monkeypatch):
    monkeypatch.setattr(drawing, "FEW_TOKENS", few)
    monkeypatch.setattr(drawing, "_BEST", best)
    level = torch.zeros(10)
    assert draws(level, SamplingParams(temperature=1.0, top_k=3), 300)[3:].sum() == 0
    counts = draws(level, SamplingParams(temperature=1.0, top_p=0.35), 100)
    assert (counts[:4] > 0).all()
    assert counts[4:].sum() == 0
    for top_p, kept in ((0.1, 1), (0.5, 5), (0.6, 6)):  # reached exactly
        assert np.flatnonzero(draws(level, SamplingParams(temperature=1.0, top_p=top_p), 100)).max() == kept - 1
    best = torch.tensor([1.0, 4.0, 4.0, 3.0])
    assert np.flatnonzero(draws(best, SamplingParams(temperature=1.0, min_p=1.0), 100)).tolist() == [1, 2]


def test_each_row_of_a_batch_has_its_own_top_k():
    of_row, n = (1, 2, 3, 6, 0), 100
    sampler = Sampler(8)
    for request in range(len(of_row) * n):
        sampler.add(request, SamplingParams(temperature=1.0, top_k=of_row[request // n]), request, 1, ())
    tokens = sampler.sample(torch.zeros(len(of_row) * n, 8), list(range(len(of_row) * n)), [1] * len(of_row) * n)
    for row, top_k in enumerate(of_row):
        assert {token.token for token in tokens[row * n : row * n + n]} == set(range(top_k or 8))


def test_a_number_draws_the_token_whose_share_of_the_cdf_it_lies_in():
    level, params = torch.tensor([-math.inf, 0.0, 0.0, -math.inf, 0.0, 0.0, -math.inf]), SamplingParams(temperature=1.0)
    numbers = [0.0, 0.2, 0.25, 0.5, 0.7, 0.75, 1 - 2**-53]
    logits = level.expand(len(numbers), 7)
    for own in (params, dataclasses.replace(params, top_k=6), dataclasses.replace(params, top_p=0.9999)):
        (draw,) = draws_of([(r, own, number) for r, number in enumerate(numbers)], 7, logits.device)
        assert draw.tokens(logits, logits.amax(-1), *map(torch.from_numpy, draw.arrays)).tolist() == [
            1,
            1,
            2,
            4,
            4,
            5,
            5,
        ]


@settings(max_examples=examples(40))
@given(
    st.sampled_from([0.2, 1.0, 40.0]),
    st.floats(0.01, 0.9999),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([2, 33, 300]),
    st.sampled_from([0, 1, 9]),
    st.integers(0, 10_000),
)
def test_top_p_by_sorting_by_the_best_and_by_sums_of_digits_keeps_the_same_tokens(
    temperature, top_p, min_p, vocab, decimals, seed
):
    logits = logits_of(seed, 6, vocab).mul_(3.0).round_(decimals=decimals)
    logits[0] = logits[1].clone().masked_fill_(logits[1] < 0, -math.inf)
    logits[5, 1::2] = -0.0
    sampler = Sampler(vocab)
    for r in range(6):
        own = SamplingParams(temperature=temperature, top_p=top_p if r % 3 else 1 - top_p / 2, min_p=min_p)
        sampler.add(r, own, seed + r, 1, ())
    drawn = []
    for few, best in ((1000, 512), (0, 512), (0, 1), (0, 5)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drawing, "FEW_TOKENS", few)
            patch.setattr(drawing, "_BEST", best)
            drawn.append([[t.token for t in sampler.sample(logits, range(6), [at] * 6)] for at in (1, 2)])
    assert drawn == drawn[:1] * 4


def test_rows_are_sampled_in_as_many_parts_as_memory_asks_for(monkeypatch):
    logits, sampler = logits_of(2, 9, 50), Sampler(50)
    for r in range(9):
        sampler.add(r, SamplingParams(temperature=float(r % 3), logprobs=r if r % 2 else None), r, 2, ())
    whole = sampler.sample(logits, list(range(9)), [2] * 9)
    for rows in (1, 2, 4):
        monkeypatch.setattr(ranking, "_MAX_ELEMENTS", {"cpu": 50 * rows + 1})
        assert sampler.sample(logits, list(range(9)), [2] * 9) == whole


def test_bad_words_of_every_length_are_known():
    params = SamplingParams(bad_words_ids=((9,), (1, 2, 3, 4), (3, 5), (7, 3, 6)))
    for history, banned in (
        ([8, 1, 2, 3], {9, 4, 5}),
        ([1, 2, 8, 3], {9, 5}),
        ([8, 8, 7, 3], {9, 5, 6}),
        ([3, 8], {9}),
    ):
        params_of_all = dataclasses.replace(params, logprobs=12)
        found = sample_one(torch.zeros(12), params_of_all, history=[0, *history], prompt_len=1)
        assert {token for token, _ in found.top} == set(range(12)) - banned


def test_a_request_that_is_gone_leaves_nothing():
    sampler = Sampler(8)
    for params in (SamplingParams(presence_penalty=1.0), SamplingParams()):
        sampler.add(0, params, 0, 1, ())
        assert sampler.keeps_past == params.has_penalties
    sampler.add(0, SamplingParams(temperature=1.0), 0, 1, ())
    sampler.drop(0)
    assert not sampler.keeps_past
    with pytest.raises(KeyError):
        sampler.params(0)


@settings(max_examples=examples(60))
@given(st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=20), st.floats(0.01, 0.99))
def test_the_top_p_set_is_the_smallest_that_reaches_p(row, top_p):
    logits_V = torch.tensor(row, dtype=torch.float32)
    p = np.exp(logits_V.numpy().astype(np.float64))
    p /= p.sum()
    drawn = draws(logits_V, SamplingParams(temperature=1.0, top_p=top_p), 400) > 0
    least = p[drawn].min()
    assert p[p > least + 1e-12].sum() < top_p + 1e-9  # without its least member the set falls short


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_eos_is_masked_until_min_tokens_are_out(temperature):
    params = SamplingParams(temperature=temperature, min_tokens=2)
    logits_V = torch.zeros(6)
    logits_V[EOS] = 100.0 if temperature < 50 else 0.0
    for seed in range(50):
        for outputs in range(2):
            history = [1] * (3 + outputs)
            assert sample_one(logits_V, params, history=history, prompt_len=3, seed=seed).token != EOS
    if temperature < 50:
        assert sample_one(logits_V, params, history=[1] * 5, prompt_len=3).token == EOS


def test_history_is_replayed_after_preemption():
    params = SamplingParams(repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=0.3, logprobs=3)
    logits, tokens = logits_of(3, 1, 16), [1, 2, 3, 2, 2, 5]
    straight = Sampler(16)
    straight.add(4, params, 0, 3, ())
    straight.feed(4, 0, tokens[:2])
    for i in range(2, 6):
        straight.feed(4, i, tokens[i : i + 1])
    expected = straight.sample(logits, [4], [6])
    straight.feed(4, 0, tokens[:4])  # without a drop: positions fed before are passed over
    straight.feed(4, 4, tokens[4:])
    assert straight.sample(logits, [4], [6]) == expected
    straight.drop(4)
    straight.add(4, params, 0, 3, ())
    straight.feed(4, 0, tokens[:5])
    straight.feed(4, 5, tokens[5:])
    assert straight.sample(logits, [4], [6]) == expected
    other = Sampler(16)
    other.add(4, params, 0, 6, ())  # the same tokens, all of them prompt: no output penalties
    other.feed(4, 0, tokens)
    assert other.sample(logits, [4], [6]) != expected


def test_a_gap_in_the_history_is_an_error():
    sampler = Sampler(16)
    sampler.add(0, SamplingParams(presence_penalty=1.0), 0, 4, ())
    with pytest.raises(AssertionError, match="never fed"):
        sampler.feed(0, 2, [1, 2])


def test_padding_of_the_vocabulary_is_never_sampled():
    logits = torch.cat([torch.zeros(2, 5), torch.full((2, 3), 100.0)], dim=1)
    sampler = Sampler(5)
    sampler.add(0, SamplingParams(logprobs=8), 0, 1, ())
    sampler.add(1, SamplingParams(temperature=1.0), 0, 1, ())
    greedy, drawn = sampler.sample(logits, [0, 1], [1, 1])
    assert greedy.token == 0
    assert greedy.logprob == pytest.approx(math.log(1 / 5))
    assert len(greedy.top) == 5
    assert drawn.token < 5


@pytest.mark.parametrize("row", [[math.nan] * 4, [0.0, math.inf, 0.0, 0.0], [-math.inf] * 4, [0.0, math.nan, 9.0, 0.0]])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0, 1e30])
def test_logits_that_are_not_finite_give_no_token(row, temperature):
    params = SamplingParams(temperature=temperature, top_p=0.5, logprobs=2)
    assert sample_one(torch.tensor(row), params, history=[1], prompt_len=1).token == NO_TOKEN


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0, 1e30])
def test_extreme_logits_give_a_token(temperature):
    params = SamplingParams(temperature=temperature, top_p=0.5, logprobs=2)
    assert sample_one(torch.tensor([1e38, -1e38, 0.0, 0.0]), params, history=[1], prompt_len=1).token in range(4)


def test_no_rows_give_no_tokens():
    assert Sampler(8).sample(torch.zeros(0, 8), [], []) == []
