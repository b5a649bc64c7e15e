"""A CUDA device that computes shapes, types and devices alone, on a build of torch for CPUs.

Inside `FakeCuda`, what a GPU would refuse, or would make the host wait for, raises:

- an operator that is given tensors of both devices (torch raises);
- a read of the device's data: `item`, `tolist`, `nonzero`, a boolean index (torch raises);
- a copy between the devices that waits: one without `non_blocking`, or of host memory that is not page-locked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


class HostWaitError(AssertionError):
    """The host would wait for the device."""


def _take(x: Tensor, index: Any) -> Tensor:
    """Return `x[index]` by operators: torch's own indexing asks a CUDA driver for the current device."""
    parts = index if isinstance(index, tuple) else (index,)
    gaps = x.dim() - sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis not in [part for part in parts if not isinstance(part, Tensor)]:
        parts = (*parts, Ellipsis)
    dim = 0
    tensors: list[Tensor | None] = []
    for part in parts:
        if part is Ellipsis:
            dim += gaps
        elif part is None:
            x = x.unsqueeze(dim)
            dim += 1
        elif isinstance(part, slice):
            x = aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
            dim += 1
        elif isinstance(part, int):
            x = x.select(dim, part)
        elif isinstance(part, Tensor):
            if part.dtype == torch.bool:
                raise HostWaitError("a boolean index waits for the device, which counts what it picks")
            tensors += [None] * (dim - len(tensors)) + [part]
            dim += 1
        else:
            raise HostWaitError(f"an index of type {type(part).__name__} is copied to the device, and waits")
    return aten.index.Tensor(x, tensors) if tensors else x


class _Driver(TorchFunctionMode):
    """Replaces what needs a CUDA driver, indexing and page-locking, and refuses copies that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.may_wait = False

    def _check(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        """Raise if a copy between the devices waits. A number of the host is an argument of a kernel, not a copy."""
        devices = source.device.type, target.device.type
        if self.may_wait or devices[0] == devices[1] or (source.dim() == 0 and devices[0] == "cpu"):
            return
        if not non_blocking:
            raise HostWaitError(f"a copy from {devices[0]} to {devices[1]} without non_blocking waits")
        if not getattr(source if devices[0] == "cpu" else target, "is_page_locked", False):
            raise HostWaitError("a copy of pageable memory waits")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__ and args[0].device.type == "cuda":
            return _take(*args)
        if func is Tensor.__setitem__ and args[0].device.type == "cuda":
            target, value = _take(args[0], args[1]), args[2]
            if not isinstance(value, Tensor):
                return target.fill_(value)
            self._check(value, target, False)
            return aten.copy_.default(target, value)
        if func is Tensor.pin_memory:
            locked = args[0].clone()
            locked.is_page_locked = True
            return locked
        if func is torch.empty and kwargs.get("pin_memory"):
            locked = func(*args, **kwargs)
            locked.is_page_locked = True
            return locked
        if func is Tensor.copy_:
            self._check(args[1], args[0], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            return aten.copy_.default(*args, **kwargs)
        if func is Tensor.to and (device := _device_of(args[1:], kwargs)) is not None:
            self._check(args[0], torch.empty(0, device=device), kwargs.get("non_blocking", False))
        if self.may_wait:
            return func(*args, **kwargs)
        if func in (Tensor.cpu, Tensor.numpy, Tensor.nonzero, torch.nonzero) and args[0].device.type == "cuda":
            raise HostWaitError(f"{func.__name__} waits for the device")
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            raise HostWaitError("torch.tensor copies pageable memory to the device, and waits")
        return func(*args, **kwargs)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    named = kwargs.get("device", next((a for a in args if isinstance(a, (torch.device, str))), None))
    return None if named is None else torch.device(named)


class FakeEvent:
    """An event of a stream: to wait for it is a wait of the host."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        raise HostWaitError("synchronize waits for the device")


class FakeCuda:
    """Tensors on `CUDA` are fake within this context; those of the CPU become fake where they meet them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FakeCuda:
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.cuda, "current_device", lambda: CUDA)  # where Megatron's layers lie
        patch.setattr(torch.cuda, "Event", FakeEvent)
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self._driver = self._stack.enter_context(_Driver())
        return self

    @contextlib.contextmanager
    def may_wait(self) -> Iterator[None]:
        """Allow copies that wait, as while a stage is built."""
        self._driver.may_wait = True
        yield
        self._driver.may_wait = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
