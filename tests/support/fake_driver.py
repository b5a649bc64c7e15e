"""A rank of NCCL's and CUDA's making on a CPU: fake tensors, stubs of streams, events, graphs and communicators.

The stubs keep a journal of what happened in which order, and refuse what a GPU would hang at:

- a communicator is aborted or destroyed only once no graph is left that has captured a collective;
- an event that a stuck receive keeps back is waited for until the communicators are aborted;
- a thread that waits for the device has chosen it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from gapless.models.transfers import Download
from gapless.parallel import groups
from tests.support.fake_cuda import CUDA, FakeCuda, HostWaitError

HANG_S = 10.0  # of what would hang for good


class _Stream:
    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass


class FakeDriver(FakeCuda):
    """A `FakeCuda` on which graphs are captured and replayed, and groups are NCCL's by name.

    Attributes:
        journal: what happened, in order.
        is_stuck: set while the device waits for another rank.
        environment: the variables as the first group was made.
        pipeline_ctas: the `max_ctas` of each group that was made with options, by its ranks.
        chosen: by the name of a thread: the device that it has chosen.
        on_capture: is called as a graph is captured.
        launch: is called before an activation is sent, as the launch that may wait for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.journal: list[str] = []
        self.is_stuck = threading.Event()
        self.environment: dict[str, str] = {}
        self.pipeline_ctas: dict[tuple[int, ...], int] = {}
        self.chosen: dict[str, torch.device] = {}
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs that have captured a collective
        self._capturing: Any = None
        self.on_capture: Callable[[], None] = lambda: None
        self.launch: Callable[[], None] = lambda: None

    def log(self, word: str) -> None:
        if not self.journal or self.journal[-1] != word:
            self.journal.append(word)

    def __enter__(self) -> FakeDriver:
        super().__enter__()
        patch = self._patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in self._cuda().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(Download, "read", lambda download: self._read(download))
        self._patch_groups(patch)
        self._mode = next(m for m in _modes() if isinstance(m, FakeTensorMode))
        return self

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Have another thread than the one that entered this context see the fake device too."""
        with self._mode, self._driver:
            yield

    def until_free(self) -> None:
        """Wait while the device is stuck."""
        deadline = time.monotonic() + HANG_S
        while self.is_stuck.is_set() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _wait(self) -> None:
        """Wait for the device, as a thread that may."""
        name = threading.current_thread().name
        if self._driver.may_wait and name == "MainThread":
            return
        if name not in ("report", "abort"):
            raise HostWaitError("the host waits for the device")
        assert self.chosen.get(name) == CUDA, f"the thread {name} is on device 0 of the node"
        self.until_free()

    def _cuda(self) -> dict[str, Any]:
        driver = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                pass

            def record(self, stream: Any = None) -> None:
                pass

            def synchronize(self) -> None:
                driver._wait()

            def elapsed_time(self, other: Any) -> float:
                return 0.0

        class Graph:
            def __init__(self) -> None:
                weakref.finalize(self, driver.log, "drop graphs")

            def replay(self) -> None:
                driver.log("replay")

        @contextlib.contextmanager
        def graph(own: Graph, **_: Any) -> Iterator[None]:
            driver.log("capture")
            driver.on_capture()
            driver._capturing = own
            yield
            driver._capturing = None

        def set_device(device: torch.device) -> None:
            driver.chosen[threading.current_thread().name] = device

        return {
            "Event": Event,
            "Stream": _Stream,
            "stream": contextlib.nullcontext,
            "current_stream": _Stream,
            "CUDAGraph": Graph,
            "graph": graph,
            "graph_pool_handle": lambda: (0, 0),
            "set_device": set_device,
            "synchronize": lambda device: driver.log("synchronize"),
        }

    def _read(self, download: Download) -> list[np.ndarray]:
        self._wait()
        return [np.zeros(tensor.shape, dtype=np.int64) for tensor in download._tensors]

    def _patch_groups(self, patch: pytest.MonkeyPatch) -> None:
        real_start, real_new, real_destroy = dist.init_process_group, dist.new_group, dist.destroy_process_group
        real_abort = dist.distributed_c10d._abort_process_group

        class Options:
            def __init__(self, is_high_priority_stream: bool) -> None:
                self.config = type("Config", (), {})()

        def start(backend: str, *, rank: int, world_size: int, **_: Any) -> None:
            assert backend == "nccl"
            self.log("connect")
            self.environment = self.environment or dict(os.environ)
            real_start("fake", store=FakeStore(), rank=rank, world_size=world_size)

        def new(ranks: list[int], pg_options: Any = None, **kwargs: Any) -> Any:
            if pg_options is not None:
                self.pipeline_ctas[tuple(ranks)] = pg_options.config.max_ctas
            return real_new(ranks, **kwargs)

        def abort(group: Any = None) -> None:
            self.log("begin abort")
            if group is not None:
                self.is_stuck.clear()  # it waited for an activation
                real_abort(group)
                return
            assert not self.is_stuck.is_set(), "the host waits for the device, and the graphs for the host"
            self._await_graphs()
            self.log("abort")
            real_abort()

        def destroy() -> None:
            self._await_graphs()
            self.log("destroy")
            real_destroy()

        patch.setattr(dist, "init_process_group", start)
        patch.setattr(dist, "new_group", new)
        patch.setattr(dist, "destroy_process_group", destroy)
        patch.setattr(dist, "ProcessGroupNCCL", type("ProcessGroupNCCL", (), {"Options": Options}), raising=False)
        patch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
        patch.setattr(groups, "_bind_to", lambda host: None)
        for word in ("isend", "send", "recv", "all_reduce"):
            patch.setattr(dist, word, self._spoken(word, getattr(dist, word)))

    def _spoken(self, word: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, **kwargs: Any) -> Any:
            if self._capturing is not None:
                self.holders.add(self._capturing)
            if len(tensor) == 1:
                self.log(f"meet {kwargs.get('src', kwargs.get('dst', 'stage'))}")
            elif word == "isend":
                self.launch()
            return real(tensor, **kwargs)

        return call

    def _await_graphs(self) -> None:
        """Wait as NCCL does: a communicator ends after the graphs that captured it."""
        deadline = time.monotonic() + HANG_S
        while self.holders and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not self.holders, "a communicator waits for a graph"


def _modes() -> list[Any]:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())
