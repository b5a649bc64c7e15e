"""Captures device work as CUDA graphs, so that the host launches one graph instead of each kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def capture_graphs(
    works: Sequence[Callable[[], None]], on_work: Callable[[], None] = lambda: None
) -> list[Callable[[], None]]:
    """Capture each of `works` on the current CUDA device, and return a function per work that replays it.

    Each work is called twice, the first time as warm-up. Its inputs and outputs must be at fixed addresses, and no
    tensor that it allocates may outlive it. Then all graphs share one memory pool, sized for the largest, and can be
    replayed in any order, one at a time.

    Ranks that communicate in `works` must call this at the same time. `on_work` is called before each call of a work.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for work in works:  # warm-up: cuBLAS and NCCL initialize, which a capture does not allow
            on_work()
            work()
    torch.cuda.current_stream().wait_stream(stream)
    pool = torch.cuda.graph_pool_handle()
    replays = []
    for work in works:
        on_work()
        graph = torch.cuda.CUDAGraph()
        # Check only this thread's calls: NCCL's thread queries events during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
        replays.append(graph.replay)
    return replays
