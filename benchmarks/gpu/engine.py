"""Generates in one process: tokens must equal a CPU's for every sampling parameter, without host synchronization."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from gapless.conf.sampling import SamplingParams
from gapless.conf.structured_outputs import StructuredOutputs
from gapless.runtime.engine.llm import LLM

from ..support.results import ROOT
from .parts import Task
from .rows import Row, checked, figure, missing

HARDWARE = {"cuda": "h100", "cpu": "cpu"}
MEMORY_GIB = 8.0
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 7}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": DRAWN,
    "top_k": {**DRAWN, "top_k": 20},
    "top_p": {**DRAWN, "top_p": 0.9},
    "min_p": {**DRAWN, "min_p": 0.05},
    "n": {**DRAWN, "n": 2},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence and frequency_penalty": {**DRAWN, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "logit_bias": {"logit_bias": {65: 5.0, 66: -100.0}},
    "allowed_token_ids": {**DRAWN, "allowed_token_ids": tuple(range(65, 91))},
    "bad_words_ids": {"bad_words_ids": ((65,), (70, 71))},
    "min_tokens and stop_token_ids": {**DRAWN, "min_tokens": 5, "stop_token_ids": tuple(range(128))},
    "stop": {**DRAWN, "stop": ("a", "e")},
    "logprobs": {**DRAWN, "logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "structured_outputs": {**DRAWN, "structured_outputs": StructuredOutputs(regex="[a-z]{3,9}")},
}


def engine(task: Task) -> Iterator[Row]:
    """Compare float32 generation on the device and on a CPU."""
    exact, (texts, params) = {"model.dtype": "float32", "scheduler.chunk": 64}, _requests(task)
    with LLM(**_options(task, **exact, hardware="cpu")) as llm:
        expected = llm.generate(texts, params)
    began = time.monotonic()
    with LLM(**_options(task, **exact)) as llm:
        yield figure("engine", "start, float32 (s)", "", time.monotonic() - began)
        llm.generate(texts, params)
        found = llm.generate(texts, params)  # with prefix cache hits
    for name, here, there in zip(SAMPLING, found, expected, strict=True):
        wrong = sum(a.token_ids != b.token_ids for a, b in zip(here.outputs, there.outputs, strict=True))
        yield checked("engine", "outputs that differ from a CPU's, float32", name, wrong, 0)


def waits(task: Task) -> Iterator[Row]:
    """Generate in bfloat16 with CUDA graphs, while torch raises on any host synchronization."""
    (texts, params), began = _requests(task), time.monotonic()
    with LLM(**_options(task)) as llm:
        yield figure("waits", "start (s)", "", time.monotonic() - began)
        llm.generate(texts, params)
        for name, text, own in zip(SAMPLING, texts, params, strict=True):
            try:
                with no_waits(task.device):
                    (output,) = llm.generate([text], [own])
            except RuntimeError as error:
                yield missing("waits", "no host synchronization", name, f"{place_of(error)}: {error}")
                return  # the pipeline has failed
            yield checked("waits", "missing outputs", name, own.n - len(output.outputs), 0)
        yield from _decode(task, llm, "a micro-batch ahead")
    with LLM(**_options(task, **{"parallel.depth": 1})) as llm:
        yield from _decode(task, llm, "parallel.depth=1")


def _decode(task: Task, llm: LLM, how: str) -> Iterator[Row]:
    """Decode many requests, and measure the device's idle time between decode-only micro-batches."""
    number, length = (4, 8) if task.small else (64, 64)
    prompts, params = _requests(task)[0][:4] * (number // 4), SamplingParams(max_tokens=length, ignore_eos=True)
    llm.generate(prompts, params)
    llm.reset()
    began = time.monotonic()
    llm.generate(prompts, params)
    seconds, setting = time.monotonic() - began, f"{number} requests, {how}"
    yield figure("waits", "output tokens/s", setting, number * length / seconds)
    decodes = {m.micro_batch for m in llm.record.micro_batches if not m.chunks}
    pairs = [pair for pair in pairwise(llm.record.spans) if decodes.issuperset(span.micro_batch for span in pair)]
    idle, whole = (sum(b.begin - a.end for a, b in pairs), sum(b.end - a.end for a, b in pairs))
    yield figure("waits", "idle between decodes, share of the device's time", setting, idle / whole)


@contextmanager
def no_waits(device: str) -> Iterator[None]:
    """Make torch raise when the host synchronizes with the device. No effect on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def place_of(error: BaseException) -> str:
    """Return file and line of gapless' innermost stack frame in an error or its cause."""
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    frame = [frame for frame in frames if "torch/" not in frame.filename][-1]
    return f"{frame.filename.removeprefix(f'{ROOT}/').rpartition('site-packages/')[2]}:{frame.lineno}"


def _options(task: Task, **more: Any) -> dict[str, Any]:
    return {"model": "shipped", "hardware": HARDWARE[task.device], "hardware.memory_gib": MEMORY_GIB, **more}


def _requests(task: Task) -> tuple[list[list[int]], list[SamplingParams]]:
    """Make a prompt for each of `SAMPLING`; some share a prefix, so that the prefix cache has hits."""
    number, longest = (8, 40) if task.small else (24, 200)
    draw = random.Random(1)
    alike = [draw.randrange(97, 123) for _ in range(longest // 2)]
    params = [
        SamplingParams(**{"max_tokens": number, "ignore_eos": "structured_outputs" not in given, **given})
        for given in SAMPLING.values()
    ]
    own = [[draw.randrange(97, 123) for _ in range(draw.randrange(2, longest // 2))] for _ in params]
    return [alike * (place % 3 == 0) + tokens for place, tokens in enumerate(own)], params
