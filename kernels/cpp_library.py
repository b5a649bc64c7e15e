"""Compiles a C++ file of the package once for a level of instruction sets and a type, and loads it.

The library is in the user's cache, named by a hash of its source and headers, the compiler and the level. Sources
use no header of torch, so that they take seconds to compile; `element.h` has the type. They use torch's OpenMP, so that
both share one pool of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..conf.user_path import user_cache
from . import processor

_log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent / "cpp"
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}
ELEMENTS = {torch.float32: "float", torch.bfloat16: "BFloat16"}  # the types that a library may be had for
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
)


class NoLibraryError(Exception):
    """The library cannot be had on this machine; the message says why."""


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
        library = _load(_SOURCES / f"{name}.cpp", (*_FLAGS, f"-DELEMENT={ELEMENTS[dtype]}"))
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


def _load(source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    level = processor.level()
    if level is None:
        raise NoLibraryError("there are no kernels for this processor")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoLibraryError("there is no C++ compiler (c++, g++ or clang++)")
    flags = (*level.flags, *flags)
    files = (path.read_bytes() for path in (source, *sorted(_SOURCES.glob("*.h"))))
    parts = (*files, compiler.encode(), *(flag.encode() for flag in flags))
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    try:
        target = user_cache() / f"{source.stem}-{name}.so"
        if not target.exists():
            _compile(compiler, flags, source, target)
        if others := [path for path in (target, target.parent) if not _is_ours_alone(path)]:
            raise NoLibraryError(f"{others[0]} can be written to by anyone")
        return ctypes.CDLL(str(target))
    except (OSError, RuntimeError) as error:
        raise NoLibraryError(str(error)) from None


def _compile(compiler: str, flags: tuple[str, ...], source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        built = Path(folder, target.name)  # other ranks may build the same at the same time
        done = subprocess.run(
            [*shlex.split(compiler), *flags, *_openmp(), str(source), "-o", str(built)], capture_output=True, text=True
        )
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise NoLibraryError(f"{compiler} failed: {first}")
        built.replace(target)


def _is_ours_alone(path: Path) -> bool:
    """Return whether no stranger could have put code there, which loading would run."""
    found = path.stat()
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & stat.S_IWOTH


def _openmp() -> list[str]:
    """Return the linker's words for the OpenMP library that torch has loaded."""
    folder = Path(torch.__file__).parent / "lib"
    found = sorted(folder.glob("libgomp*.so*"))
    return [f"-Wl,--no-as-needed,{found[0]}"] if found else []
