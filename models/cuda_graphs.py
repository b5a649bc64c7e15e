"""Captures work on the device as CUDA graphs, so that the host launches a graph instead of each kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def capture_graphs(
    works: Sequence[Callable[[], None]], on_work: Callable[[], None] = lambda: None
) -> list[Callable[[], None]]:
    """Return for each of `works` a function that replays what it queues on the current CUDA device.

    Each is called twice, once to warm up. What it reads and writes must stay where it is, and no tensor that it
    allocates may outlive it: then all graphs can share one memory pool, as large as what the largest needs, and can be
    replayed in any order, one after the other.

    Ranks that communicate in `works` must call this at the same time. `on_work` is called before each call of a work.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for work in works:  # cuBLAS and NCCL set themselves up, which a capture does not allow
            on_work()
            work()
    torch.cuda.current_stream().wait_stream(stream)
    pool = torch.cuda.graph_pool_handle()
    replays = []
    for work in works:
        on_work()
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are checked: NCCL's own thread asks for events meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
        replays.append(graph.replay)
    return replays
