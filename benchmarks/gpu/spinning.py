"""GEMMs while a kernel occupies some multiprocessors, as NCCL kernels do while they wait for another rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from .floor import ROWS, linear_shapes
from .model import architecture, dtype_of
from .parts import Task
from .rows import Row, figure, missing
from .timing import seconds_of

HELD = (1, 2, 4, 8, 16)
SPIN_MS = 200
SOURCE = """
extern "C" __global__ void spin(int milliseconds, unsigned* sink) {
    extern __shared__ unsigned held[];
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < 1000000ull * milliseconds);
    held[threadIdx.x] = (unsigned)now;
    if (held[threadIdx.x] == 1u) sink[0] = 1u;
}
"""


def spinning(task: Task) -> Iterator[Row]:
    """Time a layer's GEMM over 512 rows with 0 to 16 multiprocessors occupied."""
    where, dtype = torch.device(task.device), dtype_of(task.device)
    inputs, outputs = linear_shapes(architecture("llama-13b", task.small))["ffn_ln1"]
    x, weight = (torch.randn(*shape, device=where, dtype=dtype) for shape in ((ROWS, inputs), (inputs, outputs)))
    product = partial(torch.mm, x, weight)
    alone = seconds_of(product, where, 0.3, 100)
    setting = f"{ROWS} x {inputs} x {outputs}"
    yield figure("spinning", "GEMM alone (ms)", setting, 1e3 * alone)
    if task.device != "cuda":
        return
    compiled = torch.cuda._compile_kernel(SOURCE, "spin")
    shared = int(torch.cuda.get_device_properties(where).shared_memory_per_block_optin * 0.9) // 1024 * 1024
    compiled.set_shared_memory_config(shared)  # leaves no room for a GEMM block on the same multiprocessor
    sink, stream = torch.zeros(1, device=where, dtype=torch.int32), torch.cuda.Stream()
    for held in HELD:
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        compiled((held, 1, 1), (512, 1, 1), [SPIN_MS, sink], shared, stream)
        begin.record()
        number = max(1, int(0.3 * SPIN_MS / 1e3 / alone))
        for _ in range(number):
            product()
        end.record()
        end.synchronize()
        setting = f"{held} occupied multiprocessors"
        if stream.query():
            note = "the kernel that occupies them ended before the GEMMs"
            yield missing("spinning", "GEMM, share of its rate alone", setting, note)
            continue
        share = alone * number / (begin.elapsed_time(end) / 1e3)
        yield figure("spinning", "GEMM, share of its rate alone", setting, share)
    torch.cuda.synchronize()
