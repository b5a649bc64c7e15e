"""The measured model: LLaMA-13B with random weights and as many layers as fit on the device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import nn

from gapless.conf.architecture import Architecture
from gapless.conf.build import build, load_group
from gapless.conf.schema import ModelConfig
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.checkpoint import Checkpoint
from gapless.models.cuda_graphs import capture_graphs
from gapless.models.graphed_stage import GraphedStage
from gapless.models.memory import kv_bytes_per_token
from gapless.models.stage import Stage
from gapless.models.stage_spec import StageSpec
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape

from ..paper.one_gpu import LLAMA_13B_BATCHES

BLOCK = 16
MEMORY_SHARE = 0.85  # share of the device's free memory for weights and KV cache; the rest is for activations
CPU_BYTES = 1 << 30  # "device" memory of a CPU
STD = 0.02
KV_TOKENS = max(batch * length for length, batch in LLAMA_13B_BATCHES.items()) + 512  # plus a chunk


def architecture(name: str, small: bool) -> Architecture:
    """Return the architecture of a model of `conf/model/`; if `small`, a tiny one with two layers."""
    arch = Checkpoint.open(build(ModelConfig, load_group("model", name), "model")).arch
    if not small:
        return arch
    return replace(
        arch, vocab_size=512, hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, ffn_size=128, num_layers=2
    )


def dtype_of(device: str) -> torch.dtype:
    """Return bfloat16 on CUDA, float32 on a CPU."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def free_bytes(device: str) -> int:
    """Return the bytes available for weights and KV cache."""
    return int(MEMORY_SHARE * (torch.cuda.mem_get_info()[0] if device == "cuda" else CPU_BYTES))


def start(device: str) -> Groups:
    """Start the process groups of one rank."""
    return Groups.start(Rendezvous(0, 1, "", "cuda:0" if device == "cuda" else "cpu"), Mesh(1, 1), 120)


def layers_that_fit(arch: Architecture, device: str, kv_tokens: int) -> int:
    """Return how many of the model's layers fit, with embedding, LM head and their KV cache.

    Raises:
        MemoryError: not even one fits.
    """
    element = dtype_of(device).itemsize
    layer = arch.layer_params * element + kv_tokens * kv_bytes_per_token(arch, 1, 1, element)
    layers = (free_bytes(device) - 2 * arch.embedding_params * element) // layer
    if layers < 1:
        raise MemoryError(f"no layer of {layer / 2**30:.1f} GiB fits the device's free memory")
    return min(arch.num_layers, layers)


def random_stage(arch: Architecture, groups: Groups, kv_tokens: int, block_size: int = BLOCK) -> Stage:
    """Build a stage of all layers of `arch` with random weights and a KV cache of `kv_tokens` tokens."""
    spec = StageSpec(
        model=ModelConfig(architecture=arch, dtype="bfloat16" if groups.device.type == "cuda" else "float32"),
        arch=arch,
        layers=(0, arch.num_layers),
        num_blocks=-(-kv_tokens // block_size),
        block_size=block_size,
    )
    stage = Stage(spec, groups)
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
    """Build LLaMA-13B, or as many of its layers as fit, once per process."""
    arch = architecture("llama-13b", small)
    groups = start(device)
    layers = layers_that_fit(arch, device, KV_TOKENS)
    return random_stage(replace(arch, num_layers=layers), groups, KV_TOKENS)


def with_graphs(stage: Stage) -> GraphedStage:
    """Return the stage with CUDA graphs, as in a run on CUDA. On a CPU the same pieces run eagerly."""
    return GraphedStage(stage, capture_graphs if stage.device.type == "cuda" else list)


def batch_of(shape: MicroBatchShape, block_size: int = BLOCK) -> RaggedBatch:
    """Make a micro-batch of a shape. Requests have consecutive KV blocks; the first chunks are those that sample."""
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
    """Return the number of KV slots of the requests of a shape."""
    sizes = [length + prefix for length, prefix in shape.chunks]
    sizes += [shape.context // shape.decodes] * shape.decodes if shape.decodes else []
    return sum(-(-size // block_size) * block_size for size in sizes)
