"""The model that is measured: LLaMA-13B with as many of its layers as fit the device, and random weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import nn

from gapless.conf.architecture import Architecture
from gapless.conf.build import build, load_group
from gapless.conf.schema import ModelConfig
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.cuda_graphs import capture_graphs
from gapless.models.graphed_stage import GraphedStage
from gapless.models.huggingface import resolve_architecture
from gapless.models.memory import kv_bytes_per_token
from gapless.models.stage import Stage
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from gapless.runtime.cost.stage_costs import MicroBatchShape

from ..paper.one_gpu import LLAMA_13B_BATCHES

BLOCK = 16
MEMORY_SHARE = 0.85  # of the device's free memory, for weights and KV cache; activations take of the rest
CPU_BYTES = 1 << 30  # what a CPU's "device" has
STD = 0.02
KV_TOKENS = max(batch * length for length, batch in LLAMA_13B_BATCHES.items()) + 512  # and a chunk


def architecture(name: str, small: bool) -> Architecture:
    """Return the shape of a model of `conf/model/`; if `small`, with the same number of layers at a tiny width."""
    arch = resolve_architecture(build(ModelConfig, load_group("model", name), "model"))
    if not small:
        return arch
    return replace(
        arch, vocab_size=512, hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, ffn_size=128, num_layers=2
    )


def dtype_of(device: str) -> torch.dtype:
    """Return bfloat16 on CUDA, float32 on a CPU."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def free_bytes(device: str) -> int:
    """Return the bytes that weights and KV cache may take."""
    return int(MEMORY_SHARE * (torch.cuda.mem_get_info()[0] if device == "cuda" else CPU_BYTES))


def start(device: str) -> Groups:
    """Start the groups of one rank."""
    return Groups.start(Rendezvous(0, 1, "", "cuda:0" if device == "cuda" else "cpu"), Mesh(1, 1), 120)


def layers_that_fit(arch: Architecture, device: str, kv_tokens: int) -> int:
    """Return how many layers, at most the model's, fit with embedding, LM head and their KV cache.

    Raises:
        MemoryError: Not even one does.
    """
    element = dtype_of(device).itemsize
    layer = arch.layer_params * element + kv_tokens * kv_bytes_per_token(arch, 1, 1, element)
    layers = (free_bytes(device) - 2 * arch.embedding_params * element) // layer
    if layers < 1:
        raise MemoryError(f"no layer of {layer / 2**30:.1f} GiB fits the device's free memory")
    return min(arch.num_layers, layers)


def random_stage(arch: Architecture, groups: Groups, kv_tokens: int, block_size: int = BLOCK) -> Stage:
    """Build a stage of all layers of `arch`, its weights drawn on the device, and a KV cache of `kv_tokens` tokens."""
    stage = Stage(
        arch,
        groups,
        range(arch.num_layers),
        dtype=dtype_of(groups.device.type),
        attention="auto",
        num_blocks=-(-kv_tokens // block_size),
        block_size=block_size,
    )
    torch.manual_seed(0)
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=STD)
            else:
                nn.init.ones_(parameter)
    for tensor in (*stage.cache.keys, *stage.cache.values):
        tensor.normal_()
    stage.pack()
    return stage


@cache
def llama_13b(device: str, small: bool) -> Stage:
    """Build LLaMA-13B, or as many of its layers as fit. The process keeps it."""
    arch = architecture("llama-13b", small)
    groups = start(device)
    layers = layers_that_fit(arch, device, KV_TOKENS)
    return random_stage(replace(arch, num_layers=layers), groups, KV_TOKENS)


def with_graphs(stage: Stage) -> GraphedStage:
    """Return the stage as a run on CUDA computes it, by CUDA graphs. On a CPU the same works run without them."""
    return GraphedStage(stage, capture_graphs if stage.device.type == "cuda" else list)


def batch_of(shape: MicroBatchShape, block_size: int = BLOCK) -> RaggedBatch:
    """Make a micro-batch of a shape. Its requests own consecutive KV blocks; the first chunks that may sample do."""
    chunks, decodes, rows, block, row = list[Segment](), list[Segment](), list[int](), 0, 0

    def blocks(tokens: int) -> range:
        nonlocal block
        first, block = block, block - (-tokens // block_size)
        return range(first, block)

    for place, (length, prefix) in enumerate(shape.chunks):
        chunks.append(Segment(prefix, length, blocks(prefix + length)))
        row += length
        if place < shape.sampled - shape.decodes:
            rows.append(row - 1)
    for _ in range(shape.decodes):
        context = shape.context // shape.decodes
        decodes.append(Segment(context - 1, 1, blocks(context)))
    rows += range(row, row + shape.decodes)
    return RaggedBatch.of([7] * shape.rows, chunks, decodes, rows)


def slots_of(shape: MicroBatchShape, block_size: int = BLOCK) -> int:
    """Return the KV slots that the requests of a shape own."""
    sizes = [length + prefix for length, prefix in shape.chunks]
    sizes += [shape.context // shape.decodes] * shape.decodes if shape.decodes else []
    return sum(-(-size // block_size) * block_size for size in sizes)
