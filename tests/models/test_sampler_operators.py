"""How many operators the sampler queues: their number does not grow with the rows of a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.conf.sampling import SamplingParams
from gapless.models.sampling import Sampler
from tests.support.fake_cuda import CUDA, FakeCuda

VOCAB = 128256
VIEWS = ("view", "slice", "squeeze", "split", "unbind", "detach", "lift_fresh", "device", "empty")  # launch nothing


class Counted(TorchDispatchMode):
    """Counts the operators that launch a kernel, and the copies between the devices."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.copies: Counter[str] = Counter()  # by the device copied to

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        self.operators += not any(name in str(func) for name in VIEWS)
        if func is torch.ops.aten._to_copy.default and out.device != args[0].device:
            self.copies[out.device.type] += 1
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            self.copies[args[0].device.type] += 1
        return out


def count(params: Callable[[int], SamplingParams], rows: int) -> Counted:
    sampler = Sampler(VOCAB)
    for request in range(rows):
        sampler.add(request, params(request), request, 2, (3,))
        sampler.feed(request, 0, [5, 5, 8, 8])
    with FakeCuda():
        logits = torch.empty(rows, VOCAB, device=CUDA)
        with Counted() as counted:
            sampler.queue(logits, range(rows), [4] * rows)
    return counted


PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": 0.3}
OF_ROW = (
    SamplingParams(),
    SamplingParams(temperature=0.7, min_p=0.1, allowed_token_ids=(1, 2, 8)),
    SamplingParams(temperature=0.7, top_p=0.9, logit_bias={4: 1.0}, logprobs=3),
    SamplingParams(temperature=0.7, top_k=50, min_tokens=9, **PENALTIES),
)


@pytest.mark.parametrize(
    ("params", "most"),
    [
        (SamplingParams(), 7),
        (SamplingParams(**PENALTIES), 20),
        (SamplingParams(min_tokens=9, bad_words_ids=((7,), (5, 9))), 12),
        (SamplingParams(temperature=0.7), 25),
        (SamplingParams(temperature=0.7, top_k=50), 52),
        (SamplingParams(temperature=0.7, top_k=50, top_p=0.9), 52),
        (SamplingParams(temperature=0.7, top_p=0.9), 75),
        (SamplingParams(logprobs=5), 41),
    ],
)
def test_a_micro_batch_is_sampled_by_few_operators_and_one_copy_each_way(params: SamplingParams, most: int) -> None:
    for rows in (1, 2, 256):
        counted = count(lambda _: params, rows)
        assert counted.operators <= most
        has_upload = params.temperature or params.has_penalties or params.bad_words_ids or params.logprobs is not None
        assert counted.copies == {"cpu": 1} | ({"cuda": 1} if has_upload else {})


def test_rows_that_are_sampled_in_all_ways_add_up_once() -> None:
    few, many = (count(lambda request: OF_ROW[request % len(OF_ROW)], rows) for rows in (len(OF_ROW), 64))
    assert few.operators == many.operators <= 184
    assert many.copies == {"cpu": 1, "cuda": 1}
