"""Compiles the C++ files of `cpp/`, each for an element type and an instruction-set level. Imports no torch.

A wheel contains the libraries of all levels, compiled by `setup.py`. Otherwise they are compiled on first use, into the
user's cache, in parallel on all cores. A library's name contains a hash of its source, headers and flags. Sources
include no torch headers, so that compilation takes seconds. Libraries do not link OpenMP: `cpp_library.py` makes
torch's OpenMP available, so that both share one thread pool. libstdc++ is a dependency of torch as well.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..conf.user_path import user_cache
from . import processor
from .processor import Level

_log = logging.getLogger(__name__)
ELEMENTS = {"float32": "float", "bfloat16": "BFloat16"}  # supported element types, by torch's names
SOURCES = Path(__file__).parent / "cpp"
_BUILT = Path(__file__).parent / "built"  # shipped in a wheel, by level
COMPILE = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
)
_LINK = ("-shared", "-s", "-Wl,--as-needed,--build-id=none")


class NoLibraryError(Exception):
    """The library is unavailable on this machine; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A C++ file compiled for one element type, a key of `ELEMENTS`, and one level."""

    name: str
    dtype: str
    level: Level

    @property
    def source(self) -> Path:
        """The C++ file."""
        return SOURCES / f"{self.name}.cpp"

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags, without linker flags."""
        return *self.level.flags, *COMPILE, f"-DELEMENT={ELEMENTS[self.dtype]}"

    @property
    def file(self) -> str:
        """The library's file name."""
        files = (path.read_bytes() for path in (self.source, *sorted(SOURCES.glob("*.h"))))
        parts = b"\0".join((*files, *(flag.encode() for flag in (*self.flags, *_LINK))))
        return f"{self.name}-{self.dtype}-{hashlib.sha256(parts).hexdigest()[:20]}.so"

    def find(self) -> Path | None:
        """Return the library from the wheel, else from the user's cache; None: there is neither.

        Raises:
            NoLibraryError: other users may write to the cache.
            OSError, RuntimeError: the cache cannot be read.
        """
        file = self.file
        if (built := _BUILT / self.level.name / file).exists():
            return built
        cached = user_cache() / file
        if not cached.exists():
            return None
        if others := [path for path in (cached, cached.parent) if not _is_ours_alone(path)]:
            raise NoLibraryError(f"{others[0]} can be written to by anyone")
        return cached

    def compile(self, compiler: str, folder: Path) -> None:
        """Compile the library into a folder.

        Raises:
            NoLibraryError, OSError: the compiler failed or cannot be run.
        """
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
            compiled, linked = Path(work, "kernel.o"), Path(work, self.file)
            steps = (
                (*self.flags, "-c", str(self.source), "-o", str(compiled)),
                (*_LINK, str(compiled), "-o", str(linked)),
            )
            for arguments in steps:
                done = subprocess.run([*shlex.split(compiler), *arguments], capture_output=True, text=True)
                if done.returncode:
                    words = done.stderr.strip()
                    first = next((line for line in words.splitlines() if "error" in line), words[:200])
                    raise NoLibraryError(f"{compiler} failed: {first}")
            linked.replace(folder / self.file)


def kernels(levels: Iterable[Level], dtypes: Iterable[str] = ELEMENTS) -> list[Kernel]:
    """Return the kernels of all C++ files for these levels and types."""
    names, dtypes = [path.stem for path in sorted(SOURCES.glob("*.cpp"))], tuple(dtypes)
    return [Kernel(name, dtype, level) for level in levels for name in names for dtype in dtypes]


def compile_missing(wanted: Iterable[Kernel]) -> None:
    """Compile missing libraries into the user's cache, on all cores. Concurrent processes compile them only once.

    Raises:
        NoLibraryError, OSError, RuntimeError: a library could not be compiled; the others have been compiled.
    """
    missing = [kernel for kernel in wanted if kernel.find() is None]
    if not missing:
        return
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise NoLibraryError("there is no C++ compiler (c++ or g++)")
    folder = user_cache()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _turn(folder):
        begin = time.monotonic()
        missing = [kernel for kernel in missing if kernel.find() is None]
        missing.sort(key=lambda kernel: kernel.source.stat().st_size, reverse=True)  # largest first, to balance cores
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as pool:
            errors = list(pool.map(partial(_error, compiler=compiler, folder=folder), missing))
        if count := errors.count(None):
            of = ", ".join(dict.fromkeys(kernel.level.name for kernel in missing))
            seconds = time.monotonic() - begin
            _log.info("compiled %d kernel%s for %s in %.1f s", count, "s" * (count > 1), of, seconds)
    for error in filter(None, errors):
        raise error


def compile_for(dtype: str) -> None:
    """Compile this processor's missing kernels for a type. Errors are ignored until a kernel is loaded."""
    level = processor.level()
    if level is not None and dtype in ELEMENTS:
        with suppress(NoLibraryError, OSError, RuntimeError):
            compile_missing(kernels((level,), (dtype,)))


def _error(kernel: Kernel, compiler: str, folder: Path) -> Exception | None:
    try:
        kernel.compile(compiler, folder)
    except (NoLibraryError, OSError) as error:
        return error
    return None


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Hold a folder's compile lock, if its file system supports locks."""
    with (folder / "compile.lock").open("w") as lock:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_ours_alone(path: Path) -> bool:
    """Return whether only this user or root can write to the path: loading runs its code."""
    found = path.stat()
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & stat.S_IWOTH
