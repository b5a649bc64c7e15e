"""Loads a C++ file of the package, as `cpp_build.py` compiles it for a type of tensors and this processor's level."""

from __future__ import annotations

import ctypes
import logging
import re
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from . import cpp_build, processor
from .cpp_build import Kernel
from .cpp_build import NoLibraryError as NoLibraryError

_log = logging.getLogger(__name__)
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}
ELEMENTS = {getattr(torch, name): name for name in cpp_build.ELEMENTS}  # the types that a library may be had for
_OPENMP = re.compile(r"/lib(gomp|omp|iomp5)\b[^/]*$")


@cache
def load(name: str, dtype: torch.dtype = torch.float32, **functions: str) -> ctypes.CDLL:
    """Load the library of a C++ file for tensors of a type of `ELEMENTS`, compiled before or now.

    Args:
        name: of the file in `cpp/`, without its ending.
        dtype: of the tensors.
        functions: what each function takes, a letter an argument, and behind a colon what it returns, if anything: a
            pointer (p), int64_t (i), float (f) or double (d).

    Raises:
        NoLibraryError: the processor has no level that has kernels, there is no compiler, or it failed.
    """
    try:
        library = _load(name, ELEMENTS[dtype])
    except NoLibraryError as error:
        _log_unused(name, str(error))
        raise
    for each, types in functions.items():
        function, (arguments, _, result) = getattr(library, each), types.partition(":")
        function.argtypes, function.restype = [_TYPES[each] for each in arguments], _TYPES.get(result)
    return library


@cache
def find(name: str, dtype: torch.dtype, **functions: str) -> ctypes.CDLL | None:
    """Load as `load` does; None where the library cannot be had."""
    try:
        return load(name, dtype, **functions)
    except NoLibraryError:
        return None


@cache
def find_tiled(name: str, **functions: str) -> ctypes.CDLL | None:
    """Load as `find` does what computes with AMX's tiles, in bfloat16; None where the processor has none."""
    library = find(name, torch.bfloat16, multiplies_tiles=":i", **functions)
    return library if library is not None and library.multiplies_tiles() else None  # asks the kernel for them, too


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return where the numbers of tensors begin, as a function takes them; None is a null pointer."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@cache
def _log_unused(name: str, reason: str) -> None:
    """Say once, not for each weight, that a library is not used."""
    _log.debug("%s.cpp is not used: %s", name, reason)


def _load(name: str, dtype: str) -> ctypes.CDLL:
    level = processor.level()
    if level is None:
        raise NoLibraryError("there are no kernels for this processor")
    kernel = Kernel(name, dtype, level)
    try:
        cpp_build.compile_missing([kernel])
        _lend_openmp()
        return ctypes.CDLL(str(kernel.find()))
    except (OSError, RuntimeError) as error:
        raise NoLibraryError(str(error)) from None


@cache
def _lend_openmp() -> None:
    """Let libraries that are loaded from now on find the functions of the OpenMP library that torch has loaded."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    own = str(Path(torch.__file__).parent)  # or this and `.libs`; another package may have brought one, too
    found = sorted(filter(_OPENMP.search, mapped), key=lambda path: not path.startswith(own))
    ctypes.CDLL(found[0] if found else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
