"""Log-probabilities of given tokens, computed part by part, are those of the whole logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gapless.models import ranking
from gapless.models.sampling import queue_logprobs

V = 40


@pytest.mark.parametrize("rows_a_part", [100, 3, 1])
def test_each_row_has_its_own_token_and_as_many_of_the_best_as_it_asks_for(
    rows_a_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranking, "_MAX_ELEMENTS", {"cpu": V * rows_a_part})
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (12, V)).astype(np.float32))
    rows, tokens, num_tops = [0, 1, 2, 5, 6, 7, 11], [3, 39, 0, 8, 8, 1, 20], [0, 5, 5, 1, 0, 50, 2]
    found = queue_logprobs(logits, rows, tokens, num_tops).read()
    expected = logits.double().log_softmax(-1)
    assert [each.token for each in found] == tokens
    for each, row, num_top in zip(found, rows, num_tops, strict=True):
        best = expected[row].argsort(descending=True).tolist()
        assert each.logprob == pytest.approx(expected[row, each.token].item(), abs=1e-5)
        assert each.rank == best.index(each.token) + 1
        assert [token for token, _ in each.top] == best[:num_top]
        assert [score for _, score in each.top] == pytest.approx(expected[row, best[:num_top]].tolist(), abs=1e-5)
