"""Measures capture and replay of CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from gapless.models.graphed_stage import BUCKETS, GraphedStage
from gapless.models.work_memory import PAGE_STEP
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape

from ..paper.one_gpu import decodes
from .model import BLOCK, architecture, batch_of, layers_that_fit, random_stage, slots_of, start, with_graphs
from .parts import Task
from .rows import Row, checked, figure, missing
from .timing import host_seconds_of

LAYERS = 41
KV_TOKENS = 34 * 1024  # just enough for 64 decodes and a chunk: the layers take 26 GiB
ROUNDING = 0.05  # bfloat16 through all layers: standard deviation of the error over that of the logits


def graphs(task: Task) -> Iterator[Row]:
    """Capture graphs of 41 layers of LLaMA-13B's width; replays must equal eager execution of the same pieces."""
    yield from _captured(task, "graphs", BLOCK)


def decode_graphs(task: Task) -> Iterator[Row]:
    """Do the same with paged decode attention, so a decode-only micro-batch is one graph."""
    yield from _captured(task, "decode_graphs", PAGE_STEP)


def _captured(task: Task, part: str, block_size: int) -> Iterator[Row]:
    arch = replace(architecture("llama-13b", task.small), num_layers=2 if task.small else LAYERS)
    kv_tokens, length = (KV_TOKENS // 2, 32) if task.small else (KV_TOKENS, 512)
    arch = replace(arch, num_layers=layers_that_fit(arch, task.device, kv_tokens))
    with start(task.device) as groups:
        stage = random_stage(arch, groups, kv_tokens, block_size)
        plans = stage.attention.fixed_plans(1, min(arch.max_position, kv_tokens), 0)
        if block_size == PAGE_STEP and task.device == "cuda" and plans is None:
            yield missing(part, "decodes as one graph", f"blocks of {block_size}", stage.attention.about)
        num_graphs = len(BUCKETS) * (arch.num_layers + 1 + (0 if plans is None else len(plans.bounds)))
        setting = f"{arch.num_layers} layers, {num_graphs} graphs"
        free, began = _free(task.device), time.monotonic()
        captured = with_graphs(stage)
        left = _free(task.device)
        yield figure(part, "capture (s)", setting, time.monotonic() - began)
        yield figure(part, "graphs (MiB)", setting, (free - left) / 2**20)
        works = GraphedStage(stage, list)
        shapes = {f"{number} decodes over {length}": decodes(number, length) for number in (1, 5, 8, 64)}
        for number, chunk in ((3, 61), (64, 61), (3, 128), (64, 128)):
            shape = MicroBatchShape(((chunk, length),), number, number * length, number + 1)
            shapes[f"a chunk of {chunk} and {number} decodes"] = shape
        for setting, shape in shapes.items():
            assert slots_of(shape, block_size) <= kv_tokens, setting
            inputs = stage.prepare(batch_of(shape, block_size))
            replayed, again = (captured.forward(inputs).clone() for _ in range(2))
            for quantity, other in (("eager execution", works.forward(inputs)), ("a second replay", again)):
                differ = int((replayed != other).sum())
                yield checked(part, f"logits that differ from {quantity}", setting, differ, 0)
            whole = stage(inputs).float()
            error = ((replayed.float() - whole).std() / whole.std()).item()
            yield checked(part, "error compared with unpadded rows", setting, error, ROUNDING)
            for quantity, forward in (("with graphs", captured.forward), ("without graphs", stage)):
                host_s = host_seconds_of(partial(forward, inputs), stage.device)
                yield figure(part, f"host, {quantity} (us)", setting, 1e6 * host_s)


def _free(device: str) -> int:
    """Return the free memory in bytes after synchronizing; 0 on a CPU."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
