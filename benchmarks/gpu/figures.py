"""The paper's Table 2 and Figures 3, 4, 7, 8 and 13 on the device, in the form of the simulated ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from gapless.models.memory import kv_bytes_per_token

from ..paper.figure3 import BATCHES, seconds_of_a_token
from ..paper.figure3 import rows as figure3_rows
from ..paper.figure4 import BATCHES as LAYER_BATCHES
from ..paper.figure4 import LENGTH, TOKENS, gpt3_row, layer_rows, throughput
from ..paper.figure7 import rows as figure7_rows
from ..paper.figure8 import rows as figure8_rows
from ..paper.figure13 import chunked_over_whole, prefill_rows
from ..paper.one_gpu import LLAMA_13B_BATCHES, decode_speedup, decodes, prefill
from ..paper.table2 import iterations
from ..paper.table2 import rows as table2_rows
from .measured_times import MeasuredTimes
from .model import BLOCK, architecture, dtype_of, free_bytes, llama_13b, random_stage, start
from .parts import Task
from .rows import Row, of_paper

LEAST_BATCH = 4  # of Figure 8
KV_SHARE = 0.4  # share of free memory for the KV cache of one layer; a backend may gather it into a copy


def table2(task: Task) -> Iterator[Row]:
    """Time one iteration of each kind."""
    ours, _ = iterations(_times(task.device, task.small))
    yield from of_paper("table2", table2_rows(ours), _layers(task))


def figure3(task: Task) -> Iterator[Row]:
    """Time prefills and decodes by operator and batch size."""
    times = _times(task.device, task.small)
    first, then = seconds_of_a_token(times, [batch for batch in BATCHES if times.fits(prefill(LENGTH, batch))])
    yield from of_paper("figure3", figure3_rows(first, then), _layers(task))


def figure4(task: Task) -> Iterator[Row]:
    """Time one layer of LLaMA-13B and one of GPT-3."""
    arch = replace(architecture("llama-13b", task.small), num_layers=1)
    element = dtype_of(task.device).itemsize
    most = int(KV_SHARE * free_bytes(task.device)) // kv_bytes_per_token(arch, 1, 1, element)
    kv_tokens = min(most, max(LAYER_BATCHES) * LENGTH)
    with start(task.device) as groups:
        layer = MeasuredTimes(random_stage(arch, groups, kv_tokens), 1)
        prompts = {tokens: throughput(layer, prefill(tokens), tokens) for tokens in TOKENS}
        batches = {
            batch: throughput(layer, shape, batch)
            for batch in LAYER_BATCHES
            if layer.fits(shape := decodes(batch, LENGTH))
        }
        yield from of_paper(
            "figure4", layer_rows("a layer of llama-13b", prompts, batches), f"up to {max(batches)} decodes"
        )
        del layer
        gc.collect()  # its hooks form reference cycles
        wide = replace(architecture("gpt3-175b", task.small), num_layers=1)
        layer = MeasuredTimes(random_stage(wide, groups, max(TOKENS) + BLOCK), 1)
        chunks = {tokens: throughput(layer, prefill(tokens), tokens) for tokens in TOKENS}
        yield from of_paper("figure4", [gpt3_row("a layer of GPT-3", chunks)])


def figure7(task: Task) -> Iterator[Row]:
    """Time iterations of one prompt, including one token more than whole tiles."""
    yield from of_paper("figure7", figure7_rows(_times(task.device, task.small)), _layers(task))


def figure8(task: Task) -> Iterator[Row]:
    """Time decodes piggybacked on a chunk of 256, at each length and batch size of the paper from four on.

    Their cost is the difference of two iterations, which is below the noise for one or two decodes.
    """
    times = _times(task.device, task.small)
    found = {
        length: {batch: decode_speedup(times, batch, length) for batch in range(LEAST_BATCH, largest + 1)}
        for length, largest in LLAMA_13B_BATCHES.items()
    }
    for length, largest in LLAMA_13B_BATCHES.items():
        yield Row(
            part="figure8",
            quantity="decode speedup",
            setting=f"{length // 1024}K, B={largest}",
            value=found[length][largest],
            note=_layers(task),
        )
    costly = {length: {batch: s for batch, s in by.items() if s > 0.0} for length, by in found.items()}
    number, lost = sum(map(len, found.values())), sum(map(len, found.values())) - sum(map(len, costly.values()))
    note = f"{_layers(task)}; {lost} of {number} settings cost nothing measurable"
    yield from of_paper("figure8", figure8_rows(costly), note)


def figure13(task: Task) -> Iterator[Row]:
    """Time prefills chunk by chunk."""
    attention, whole = chunked_over_whole(_times(task.device, task.small))
    yield from of_paper("figure13", prefill_rows(attention, whole), _layers(task))


@cache
def _times(device: str, small: bool) -> MeasuredTimes:
    return MeasuredTimes(llama_13b(device, small), architecture("llama-13b", small).num_layers)


def _layers(task: Task) -> str:
    """Describe how many of the model's layers were measured."""
    there, model = llama_13b(task.device, task.small).arch.num_layers, architecture("llama-13b", task.small).num_layers
    return f"{there} of {model} layers" + (f", times {model / there:.3g}" if there < model else "")
