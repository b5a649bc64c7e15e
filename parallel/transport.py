"""Sends activations from stage to stage through torch.distributed.

A rank posts its receives ahead, so that they overlap with compute. Sends do not block.

With `tp > 1`, each rank sends one shard of the activation to the rank with the same tp rank on the next stage. The next
stage then all-gathers the shards over its tensor-parallel group (Megatron-LM's scatter-gather). So the slow link
between nodes carries every byte only once.

On CUDA, NCCL keeps a communicator and a stream per pair of ranks, so that sends, receives and compute overlap. NCCL
operations wait for the current stream, so a receive is posted from its own stream; otherwise it would wait for queued
compute. No call here makes the host wait for the device.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .device_clock import DeviceClock
from .mesh import Mesh

if TYPE_CHECKING:
    from .groups import Groups


class Arrival:
    """A receive that has been posted."""

    def __init__(
        self, slice_: Tensor, work: dist.Work, shape: tuple[int, int], groups: Groups, stream: torch.cuda.Stream | None
    ) -> None:
        self._slice = slice_
        self._work = work
        self._shape = shape
        self._groups = groups
        self._stream = stream

    def wait(self, clock: DeviceClock) -> tuple[Tensor, Any]:
        """Return the activation [T, H], and the moment of its arrival.

        On a CPU the host waits for it. On CUDA only the current stream waits.
        """
        if self._stream is None:
            self._work.wait()
            arrived = clock.mark()
        else:
            with torch.cuda.stream(self._stream):
                self._work.wait()
                arrived = clock.mark()
            compute = torch.cuda.current_stream()
            compute.wait_stream(self._stream)
            self._slice.record_stream(compute)
        return self._groups.all_gather(self._slice[None]).view(self._shape), arrived


class Transport:
    """One rank's link to the previous and the next stage. At most `depth` micro-batches are in flight."""

    def __init__(self, groups: Groups, hidden_size: int, dtype: torch.dtype, depth: int) -> None:
        self._groups = groups
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._depth = depth
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._stream = torch.cuda.Stream(groups.device) if groups.device.type == "cuda" else None

    @property
    def _mesh(self) -> Mesh:
        return self._groups.mesh

    def post_receive(self, num_tokens: int) -> Arrival:
        """Post the receive of the next activation, of `num_tokens` tokens, from the previous stage."""
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            slice_ = torch.empty(
                num_tokens * self._hidden_size // self._mesh.tp, dtype=self._dtype, device=self._groups.device
            )
            work = dist.irecv(slice_, src=self._mesh.previous, group=self._groups.pp)
        assert work is not None
        return Arrival(slice_, work, (num_tokens, self._hidden_size), self._groups, self._stream)

    def send(self, hidden_TH: Tensor) -> None:
        """Start to send the activation [T, H] to the next stage. The caller must not write to it afterwards."""
        flat = hidden_TH.contiguous().view(-1)
        share = flat.numel() // self._mesh.tp
        slice_ = flat[self._mesh.tp_rank * share : (self._mesh.tp_rank + 1) * share]
        work = dist.isend(slice_, dst=self._mesh.next, group=self._groups.pp)
        assert work is not None
        self._sending.append((work, slice_))
        while len(self._sending) > self._depth:  # its micro-batch has left the pipeline, so this wait is short
            self._sending.popleft()[0].wait()

    def drain(self) -> None:
        """Wait until the next stage has received everything that was sent."""
        while self._sending:
            self._sending.popleft()[0].wait()
