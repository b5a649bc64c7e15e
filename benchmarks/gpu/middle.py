"""Measures the loop of a middle pipeline stage on one GPU, with torch's fake process group as the other stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gapless.models.batch import RaggedBatch
from gapless.parallel.device_clock import device_clock
from gapless.parallel.groups import Groups
from gapless.parallel.megatron import parallel_state
from gapless.parallel.mesh import Mesh
from gapless.parallel.transport import Transport
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape

from ..paper.one_gpu import decodes
from .engine import no_waits, place_of
from .model import architecture, batch_of, random_stage, slots_of, with_graphs
from .parts import Task
from .rows import Row, checked, figure, missing

STAGES = 4
DEPTH = 4  # micro-batches in flight
ROUNDS = 20


def middle(task: Task) -> Iterator[Row]:
    """Receive, compute and send as stage 1 of 4, with CUDA graphs and without host synchronization."""
    arch = replace(architecture("llama-13b", task.small), num_layers=2 if task.small else 10)
    device, mesh = torch.device(task.device, 0) if task.device == "cuda" else torch.device("cpu"), Mesh(STAGES, 1, 1)
    dist.init_process_group("fake", store=FakeStore(), rank=mesh.rank, world_size=mesh.world_size)
    try:
        parallel_state.initialize_model_parallel(1, STAGES, create_gloo_process_groups=False)
        tp, pp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
        groups = Groups(mesh, device, cast(dist.ProcessGroup, tp), cast(dist.ProcessGroup, pp), owned=False)
        stage = random_stage(arch, groups, 64 * 1024 // (16 if task.small else 1))
        forward = with_graphs(stage).forward
        transport, clock = Transport(groups, arch.hidden_size, stage.dtype, DEPTH), device_clock(device)
        length = 32 if task.small else 512
        shapes = {
            "64 decodes": decodes(64, length),
            "a chunk of 192 and 64 decodes": MicroBatchShape(((192, length),), 64, 64 * length, 65),
            "a chunk of 513": MicroBatchShape(((513, 0),), sampled=1),  # more rows than a graph has
        }

        def step(batch: RaggedBatch) -> torch.Tensor:
            arrival = transport.post_receive(batch.num_tokens)
            inputs = stage.prepare(batch)
            hidden, _ = arrival.wait(clock)
            out = forward(inputs, hidden)
            transport.send(out)
            return out

        for name, shape in shapes.items():
            assert slots_of(shape) <= stage.cache.scratch_slot, name
            batch = batch_of(shape)
            step(batch)
            began = time.perf_counter()
            try:
                with no_waits(task.device):
                    for _ in range(ROUNDS):
                        out = step(batch)
                    queued = time.perf_counter() - began
            except RuntimeError as error:
                yield missing("middle", "no host synchronization", name, f"{place_of(error)}: {error}")
                continue
            if task.device == "cuda":
                torch.cuda.synchronize()
            taken = time.perf_counter() - began
            wrong = abs(out.shape[0] - batch.num_tokens) + abs(out.shape[1] - arch.hidden_size)
            yield checked("middle", "rows and columns that differ from the expected shape", name, wrong, 0)
            yield figure("middle", "host, per micro-batch (ms)", name, 1e3 * queued / ROUNDS)
            yield figure("middle", "device, per micro-batch (ms)", name, 1e3 * taken / ROUNDS)
        transport.drain()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
