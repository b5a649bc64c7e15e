"""Compares each attention backend with SDPA in float32 on realistic micro-batches, and times host and device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from gapless.conf.errors import ConfigError
from gapless.models.attention.backend import AttentionSizes
from gapless.models.attention.sdpa import SdpaBackend
from gapless.models.batch import RaggedBatch, Segment

from .parts import Task
from .rows import Row, checked, figure, missing
from .timing import host_seconds_of, seconds_of
from .versions import backend, backend_names, is_expected

HEADS = 8  # of queries: 8 groups of one, or one group of 8
TOLERANCE = 0.03  # of bfloat16, on outputs of about 1
LONGEST = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """A micro-batch and the number of blocks of its cache."""

    name: str
    batch: RaggedBatch
    num_blocks: int


def cases(block_size: int, small: bool) -> list[Case]:
    """Return cases of decodes only, chunks only, and both. Contexts, starts and blocks are in random order."""
    longest = LONGEST // 8 if small else LONGEST
    decodes = (1, 4) if small else (1, 2, 4, 8, 16, 32, 64, 128, 256)
    chunk = longest // 4
    middle = [(longest // 2, chunk), (0, chunk // 2 + 1), (longest // 3, 7)]
    made = [_case(f"{number} decodes", block_size, [], number, longest) for number in decodes]
    made.append(_case("3 chunks", block_size, middle, 0, longest))
    made += [_case(f"3 chunks and {number} decodes", block_size, middle, number, longest) for number in decodes[1::2]]
    return made


def _case(name: str, block_size: int, chunks: list[tuple[int, int]], decodes: int, longest: int) -> Case:
    """Make a case of chunks of `(start, length)`, and decodes at random lengths, over shuffled blocks."""
    draw = random.Random(name)
    spans = [*chunks, *((draw.randrange(longest), 1) for _ in range(decodes))]
    counts = [-(-(start + length) // block_size) for start, length in spans]
    blocks = list(range(sum(counts) + 3))
    draw.shuffle(blocks)
    segments = [
        Segment(start, length, [blocks.pop() for _ in range(count)])
        for (start, length), count in zip(spans, counts, strict=True)
    ]
    first = len(chunks)
    tokens = [0] * sum(length for _, length in spans)
    return Case(name, RaggedBatch.of(tokens, segments[:first], segments[first:], []), sum(counts) + 3)


def attention(task: Task) -> Iterator[Row]:
    """Compare every backend with SDPA, and time its plan, calls and kernels."""
    for name in backend_names(task.device):
        for head_dim in (64, 128):
            try:
                backend(name, task.device, head_dim=head_dim, num_blocks=8)
            except ConfigError as error:
                if is_expected(name):
                    yield missing("attention", f"{name}, error", f"heads of {head_dim}", str(error))
                continue
            for group in (1, 8):
                for block_size, window in ((16, None), (16, 200), (256, None)):
                    yield _compared(task, name, head_dim, group, block_size, window)
    for name in backend_names(task.device):
        if name != "sdpa" or task.device == "cpu":
            yield from _timed(task, name)


def _tensors(task: Task, case: Case, block_size: int, group: int, head_dim: int) -> list[torch.Tensor]:
    """Return queries [T, K, G, D], keys and values [S, K, D], in the precision of the backends."""
    generator = torch.Generator(task.device).manual_seed(0)
    dtype = torch.bfloat16 if task.device == "cuda" else torch.float32
    draw = partial(torch.randn, device=task.device, generator=generator)
    slots, kv_heads = case.num_blocks * block_size, HEADS // group
    queries = draw(case.batch.num_tokens, kv_heads, group, head_dim)
    return [x.to(dtype) for x in (queries, draw(slots, kv_heads, head_dim), draw(slots, kv_heads, head_dim))]


def _compared(task: Task, name: str, head_dim: int, group: int, block_size: int, window: int | None) -> Row:
    """Return the row with the largest error over all cases; its note names the case."""
    worst, where = 0.0, ""
    for case in cases(block_size, task.small):
        sizes = {"head_dim": head_dim, "num_blocks": case.num_blocks, "block_size": block_size, "window": window}
        tested = backend(name, task.device, **sizes)
        exact = SdpaBackend(AttentionSizes(block_size=block_size, window=window, device=torch.device(task.device)))
        given = _tensors(task, case, block_size, group, head_dim)
        with torch.inference_mode():
            found = tested.attend(*given, tested.plan(case.batch)).float()
            expected = exact.attend(*(x.float() for x in given), exact.plan(case.batch))
        error = (found - expected).abs().max().item()
        if not error <= worst:  # of NaN too
            worst, where = error, case.name
    setting = f"G={group}, D={head_dim}, blocks of {block_size}, window {window}"
    row = checked("attention", f"{name}, error", setting, worst, TOLERANCE)
    return row if row.status == "ok" else replace(row, note=where)


def _timed(task: Task, name: str) -> Iterator[Row]:
    """Time one layer with groups of 8 heads of 128: host microseconds to plan and to call, and device microseconds."""
    wanted = ("4 decodes",) if task.small else ("1 decodes", "16 decodes", "256 decodes", "3 chunks and 128 decodes")
    for case in cases(16, task.small):
        if case.name not in wanted:
            continue
        try:
            tested = backend(name, task.device, head_dim=128, num_blocks=case.num_blocks)
        except ConfigError:
            return
        given, where = _tensors(task, case, 16, 8, 128), torch.device(task.device)
        with torch.inference_mode():
            plan = tested.plan(case.batch)
            call = partial(tested.attend, *given, plan)
            times = {
                "host, plan of a micro-batch (us)": host_seconds_of(partial(tested.plan, case.batch), where),
                "host, a layer's call (us)": host_seconds_of(call, where),
                "device, a layer (us)": seconds_of(call, where),
            }
        for quantity, seconds in times.items():
            yield figure("attention", f"{name}, {quantity}", case.name, 1e6 * seconds)
