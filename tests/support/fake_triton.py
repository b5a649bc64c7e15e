"""A Triton that computes nothing: it notes what is launched, and for which arguments it would compile a kernel anew."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

KERNELS = "gapless.kernels.operators.triton"


@dataclass(frozen=True)
class Launch:
    """One launch. Triton compiles a kernel once for each `variant`."""

    kernel: str
    grid: tuple[int, ...]
    variant: tuple[tuple[str, Any], ...]


class Launches(list[Launch]):
    """All launches so far."""

    @property
    def variants(self) -> set[tuple[str, Any]]:
        return {(launch.kernel, launch.variant) for launch in self}


class FakeKernel:
    """What `triton.jit` returns."""

    def __init__(self, function: Callable[..., Any], launches: Launches, unaligned: tuple[str, ...]) -> None:
        self.name = function.__name__
        parameters = inspect.signature(function).parameters.values()
        self.names = [parameter.name for parameter in parameters]
        self.constants = {parameter.name for parameter in parameters if "constexpr" in str(parameter.annotation)}
        self.unaligned = unaligned
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **named: Any) -> None:
            given = dict(zip(self.names, args, strict=False)) | named
            assert given.keys() == set(self.names), (self.name, set(self.names) ^ given.keys())
            variant = tuple((name, self._part(name, value)) for name, value in given.items())
            self.launches.append(Launch(self.name, grid, (*variant, ("num_warps", num_warps))))

        return launch

    def _part(self, name: str, value: Any) -> Any:
        """Return what of an argument the code depends on, as in Triton's `runtime/jit.py`."""
        if name in self.constants or value is None:
            return value
        if isinstance(value, Tensor):
            is_aligned = value.storage_offset() * value.element_size() % 16 == 0  # as allocations are
            return value.dtype, is_aligned and name not in self.unaligned
        if isinstance(value, int):
            return "one" if value == 1 else value % 16 == 0
        return type(value)


@contextmanager
def fake_triton() -> Iterator[Launches]:
    """Have CUDA stages that are built here launch fake kernels. Yields their launches."""
    launches = Launches()

    def jit(function: Any = None, *, do_not_specialize_on_alignment: tuple[str, ...] = ()) -> Any:
        if function is None:
            return lambda own: FakeKernel(own, launches, tuple(do_not_specialize_on_alignment))
        return FakeKernel(function, launches, ())

    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit, triton.language = jit, language  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton", triton)
        patch.setitem(sys.modules, "triton.language", language)
        before = sys.modules.pop(KERNELS, None)  # the kernels are made when their module is imported
        try:
            yield launches
        finally:
            sys.modules.pop(KERNELS, None)
            if before is not None:
                sys.modules[KERNELS] = before
