"""Loads the C++ libraries that `cpp_build.py` compiles, for a tensor type and this processor's level."""

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
ELEMENTS = {getattr(torch, name): name for name in cpp_build.ELEMENTS}  # supported tensor types
_OPENMP = re.compile(r"/lib(gomp|omp|iomp5)\b[^/]*$")


class CppFile:
    """A C++ file of `cpp/` and its functions.

    Args:
        name: file name without the suffix.
        functions: each function's signature, one letter per argument, and the return type, if any, after a colon:
            pointer (p), int64_t (i), float (f) or double (d).
    """

    def __init__(self, name: str, **functions: str) -> None:
        self.name, self.functions = name, functions


@cache
def load(file: CppFile, dtype: torch.dtype) -> ctypes.CDLL:
    """Load the library of a C++ file for tensors of a type in `ELEMENTS`, and compile it if it is missing.

    Raises:
        NoLibraryError: there are no kernels for this processor, there is no compiler, or it failed.
    """
    try:
        library = _load(file.name, ELEMENTS[dtype])
    except NoLibraryError as error:
        _log_unused(file.name, str(error))
        raise
    for name, types in file.functions.items():
        function, (arguments, _, result) = getattr(library, name), types.partition(":")
        function.argtypes, function.restype = [_TYPES[each] for each in arguments], _TYPES.get(result)
    return library


@cache
def find(file: CppFile, dtype: torch.dtype) -> ctypes.CDLL | None:
    """Load like `load`; None if the library is unavailable."""
    try:
        return load(file, dtype)
    except NoLibraryError:
        return None


@cache
def find_tiled(file: CppFile) -> ctypes.CDLL | None:
    """Load a bfloat16 library that uses AMX, like `find`; None if the processor lacks AMX."""
    library = find(file, torch.bfloat16)
    return library if library is not None and library.multiplies_tiles() else None  # also requests AMX from Linux


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return the tensors' data pointers as C++ arguments; None is a null pointer."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@cache
def _log_unused(name: str, reason: str) -> None:
    """Log once, not per weight, that a library is not used."""
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
    """Make the symbols of torch's OpenMP library visible to libraries that are loaded later."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    own = str(Path(torch.__file__).parent)  # also matches `torch.libs`; prefer torch's over another package's
    found = sorted(filter(_OPENMP.search, mapped), key=lambda path: not path.startswith(own))
    ctypes.CDLL(found[0] if found else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
