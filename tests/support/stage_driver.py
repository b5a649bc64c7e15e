"""Greedy decoding over a chain of stages by a naive schedule.

A run names a model folder or a random architecture and a schedule. The last rank of a mesh writes what it got to the
run's `out`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gapless.conf.architecture import Architecture
from gapless.conf.schema import ModelConfig
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.build_stage import build_stage
from gapless.models.checkpoint import Checkpoint
from gapless.models.graphed_stage import GraphedStage
from gapless.models.stage import Stage
from gapless.models.stage_spec import StageSpec
from gapless.parallel.device_clock import DeviceClock
from gapless.parallel.groups import Groups
from gapless.parallel.split import split_layers
from gapless.parallel.transport import Transport

BLOCK_SIZE = 4


def block_tables(lengths: list[int], scattered: bool) -> tuple[list[list[int]], int]:
    """Blocks for each request, in a row or shuffled among all, and how many the cache needs."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    blocks = list(range(sum(counts)))
    if scattered:
        random.Random(7).shuffle(blocks)
    tables = [[blocks.pop(0) for _ in range(count)] for count in counts]
    return tables, sum(counts)


def whole(share: torch.Tensor, num_rows: int, groups: Groups) -> torch.Tensor:
    """Put the rows of all ranks of a stage together, of which each has a share."""
    rows = share.new_zeros(num_rows, share.shape[1])
    own = groups.mesh.share_of(num_rows)
    rows[own.start : own.stop] = share
    return groups.all_reduce(rows)


def step(
    stage: Stage, batch: RaggedBatch, forward: Callable[..., torch.Tensor], transport: Transport
) -> tuple[list[int], torch.Tensor | None]:
    """One micro-batch through all stages: the argmax of each sampled row, on all ranks; logits on the last stage."""
    mesh, hidden = stage.mesh, None
    if not mesh.is_first:
        hidden, _ = transport.post_receive(batch.num_tokens).wait(DeviceClock())
    out = forward(stage.prepare(batch), hidden)
    if not mesh.is_last:
        transport.send(out)
    else:
        out = whole(out, len(batch.sample_rows), transport._groups)
    tokens = out.argmax(-1) if mesh.is_last else torch.empty(len(batch.sample_rows), dtype=torch.int64)
    if mesh.pp > 1:
        dist.broadcast(tokens, src=mesh.world_size - 1)
    return tokens.tolist(), out if mesh.is_last else None


def greedy(
    stage: Stage,
    prompts: list[list[int]],
    num_new: int,
    chunks: list[int],
    tables: list[list[int]],
    forward: Callable[..., torch.Tensor],
    transport: Transport,
) -> tuple[list[list[int]], list[list[np.ndarray]]]:
    """Each iteration runs a chunk of up to `chunks[i]` tokens of up to len(chunks) prompts, and every ready decode."""
    texts = [list(p) for p in prompts]
    done = [0] * len(prompts)  # tokens in the cache
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    while any(len(t) < len(p) + num_new for t, p in zip(texts, prompts, strict=True)):
        prefilling = [r for r, p in enumerate(prompts) if done[r] < len(p)][: len(chunks)]
        decoding = [r for r, p in enumerate(prompts) if done[r] >= len(p) and len(texts[r]) < len(p) + num_new]
        tokens: list[int] = []
        parts, sampled, rows = [], [], []
        for r, size in zip(prefilling, chunks, strict=False):
            part = Segment(done[r], min(size, len(prompts[r]) - done[r]), tables[r])
            tokens += texts[r][part.start : part.context]
            parts.append(part)
            if part.context == len(prompts[r]):
                sampled.append(r)
                rows.append(len(tokens) - 1)
        decodes = [Segment(done[r], 1, tables[r]) for r in decoding]
        rows += range(len(tokens), len(tokens) + len(decodes))
        tokens += [texts[r][-1] for r in decoding]
        new, out = step(stage, RaggedBatch.of(tokens, parts, decodes, rows), forward, transport)
        for r, part in zip([*prefilling, *decoding], [*parts, *decodes], strict=False):
            done[r] = part.context
        for i, r in enumerate([*sampled, *decoding]):
            texts[r].append(new[i])
            if out is not None:
                logits[r].append(out[i].numpy())
    return [t[len(p) :] for t, p in zip(texts, prompts, strict=True)], logits


def run(groups: Groups, job: dict) -> None:
    """Run the stages of a job.

    Its keys are weights or architecture, dtype, quantization, plain, pieces, layers, replicate_embedding,
    whole_experts, prompts, num_new, chunks, scattered, out.
    """
    mesh = groups.mesh
    given = Architecture(**job["architecture"]) if "architecture" in job else None
    kernels: Any = "torch" if job.get("plain") else "auto"
    dtype = job.get("dtype", "float32")
    model = ModelConfig(
        weights=job.get("weights", "random"),
        architecture=given,
        dtype=dtype,
        kernels=kernels,
        quantization=job.get("quantization"),
    )
    arch = Checkpoint.open(model).arch
    tables, num_blocks = block_tables([len(p) + job["num_new"] for p in job["prompts"]], job["scattered"])
    layers = split_layers(arch, mesh.pp, tuple(job["layers"]) if job.get("layers") else None)[mesh.stage]
    spec = StageSpec(
        model=model,
        arch=arch,
        layers=(layers.start, layers.stop),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        seed=3,
        replicate_embedding=job.get("replicate_embedding", False),
        whole_experts=job.get("whole_experts", False),
    )
    stage = build_stage(spec, groups)
    if not job.get("plain"):
        stage.pack()
    forward = GraphedStage(stage, list).forward if job.get("pieces") else stage
    transport = Transport(groups, arch.hidden_size, stage.dtype, depth=1)
    tokens, logits = greedy(stage, job["prompts"], job["num_new"], job["chunks"], tables, forward, transport)
    transport.drain()
    if mesh.rank == mesh.world_size - 1:
        np.savez(job["out"], tokens=np.asarray(tokens), logits=np.asarray(logits))


def run_all(groups: Groups, jobs: list[dict]) -> None:
    """Run one after the other."""
    for job in jobs:
        run(groups, job)
