"""Measures the sampler by number of rows and vocabulary size: cost, and correctness if sampling is deterministic."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from gapless.conf.sampling import SamplingParams
from gapless.models.sampling import PendingTokens, Sampler

from .parts import Task
from .rows import Row, checked, figure
from .timing import host_seconds_of, seconds_of

PAST = list(range(3, 40))
KINDS = {
    "greedy": SamplingParams(),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "top_k, top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1),
    "penalties": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2, seed=1),
    "logprobs": SamplingParams(temperature=0.8, top_p=0.95, logprobs=5, seed=1),
}
NO_CHOICE = {
    "temperature=0": SamplingParams(),
    "top_k=1": SamplingParams(temperature=1.0, top_k=1, seed=1),
    "top_p=1e-6": SamplingParams(temperature=1.0, top_p=1e-6, seed=1),
    "min_p=1": SamplingParams(temperature=1.0, min_p=1.0, seed=1),
}


def sampler(task: Task) -> Iterator[Row]:
    """Sample 1, 64 and 256 rows of 32,000 and of 128,256 logits."""
    where = torch.device(task.device)
    for vocabulary in (500,) if task.small else (32_000, 128_256):
        for rows in (1, 4) if task.small else (1, 64, 256):
            generator = torch.Generator(task.device).manual_seed(rows)
            logits = 4.0 * torch.randn(rows, vocabulary, device=where, generator=generator)
            setting = f"{rows} rows of {vocabulary:,}"
            best = logits.argmax(-1).tolist()
            for name, params in NO_CHOICE.items():
                found = [sampled.token for sampled in _queue(vocabulary, rows, params, logits)().read()]
                wrong = sum(a != b for a, b in zip(found, best, strict=True))
                yield checked("sampler", f"{name}: wrong tokens", setting, wrong, 0)
            for name, params in KINDS.items():
                queue = _queue(vocabulary, rows, params, logits)
                device_s, host_s = seconds_of(queue, where), host_seconds_of(queue, where)
                yield figure("sampler", f"{name}, device (ms)", setting, 1e3 * device_s)
                yield figure("sampler", f"{name}, host (ms)", setting, 1e3 * host_s)


def _queue(vocabulary: int, rows: int, params: SamplingParams, logits: torch.Tensor) -> partial[PendingTokens]:
    """Return a call that samples a token for each row, for requests with some previous tokens."""
    made = Sampler(vocabulary)
    for request in range(rows):
        made.add(request, params, seed=request, prompt_len=len(PAST) - 8, eos_token_ids=(2,))
        made.feed(request, 0, PAST)
    return partial(made.queue, logits, list(range(rows)), [len(PAST)] * rows)
