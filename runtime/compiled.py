"""Finds the compiled control path, if `python -m gapless.launch.compile` has built it; else the sources run.

A module is compiled if its source holds the line `MARKER`: a micro-batch passes through it, and speed counts. Modules
with msgspec structs, or with functions that take arrays as well as numbers, cannot be.

Compiled code is in the user's cache, in a folder named by a hash of the sources: after an edit the sources run, until
they are compiled again. `GAPLESS_COMPILED=0` runs the sources in any case.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import version
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from ..conf.user_path import user_cache

_log = logging.getLogger(__name__)
MARKER = "# Compiled (see runtime/compiled.py)."
LIBRARY = "gapless_control__mypyc"  # the extension module that holds the code of all compiled modules
SIZES = "sizes.json"  # in a folder of compiled code: the size of each of its files
_FORM = "3"  # version of the folder's layout
_PACKAGE = Path(__file__).parents[1]
_RELATIVE_IMPORT = re.compile(r"^\s*from (\.+)([\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
_DAY = 86_400.0  # s
_UNUSED_AFTER = 30 * _DAY


def marked_sources() -> list[Path]:
    """Return the sources of the modules that are compiled, relative to the package."""
    line = f"\n{MARKER}\n".encode()
    found = [path for path in (_PACKAGE / "runtime").rglob("*.py") if line in path.read_bytes()]
    return sorted(path.relative_to(_PACKAGE) for path in found)


def folder() -> Path:
    """Return the path of the folder for what these sources compile to, whether it exists or not.

    Raises:
        OSError, RuntimeError: a source or the user's home cannot be read.
    """
    digest = hashlib.sha256(f"{_FORM} {EXTENSION_SUFFIXES[0]} {sys.version} librt {version('librt')}".encode())
    for path in _with_imports(_PACKAGE / path for path in marked_sources()):
        digest.update(path.read_bytes())
    return user_cache() / digest.hexdigest()[:20]


def _with_imports(sources: Iterable[Path]) -> list[Path]:
    """Return `sources` and the sources of the package that they import, from which the types of what they use come."""
    found: set[Path] = set()
    for path in sources:
        found.add(path)
        for dots, module, names in _RELATIVE_IMPORT.findall(path.read_text()):
            target = path.parents[len(dots) - 1].joinpath(*module.split("."))
            candidates = [target, target / "__init__", *(target / name for name in re.findall(r"\w+", names))]
            found.update(file for candidate in candidates if (file := candidate.with_suffix(".py")).is_file())
    return sorted(found)


def in_use() -> bool:
    """Return whether this process runs compiled code."""
    return LIBRARY in sys.modules


def install() -> None:
    """Let imports find the compiled modules if these sources have been compiled."""
    if os.environ.get("GAPLESS_COMPILED") == "0" or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    try:
        if not _folders():  # the hash of the sources takes 40 ms
            return
        root = folder()
    except (OSError, RuntimeError):
        return
    if not root.is_dir():
        return
    if why := damage(root):
        text = "running uncompiled: the compiled files are damaged: %s; python -m gapless.launch.compile repairs them"
        _log.warning(text, why)
    else:
        sys.meta_path.insert(0, _Finder(root))
        _note_use(root)


def _note_use(root: Path) -> None:
    """Touch the folder for `unused`, once a day."""
    try:
        if time.time() - (root / SIZES).stat().st_mtime > _DAY:
            os.utime(root / SIZES)
    except OSError:  # read only
        pass


def unused() -> list[Path]:
    """Find the folders of compiled code, of other sources or Pythons, that nothing has run for a month."""
    found = []
    for root in _folders():
        file = root / SIZES
        with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
            last_used = (file if file.exists() else root).stat().st_mtime
            if time.time() - last_used > _UNUSED_AFTER:
                found.append(root)
    return found


def _folders() -> list[Path]:
    """Find the folders of compiled code, of any sources and Python."""
    cache = user_cache()
    found = cache.iterdir() if cache.is_dir() else ()
    return [root for root in found if re.fullmatch("[0-9a-f]{20}", root.name) and root.is_dir()]


def damage(root: Path) -> str:
    """Return why the compiled modules in `root` cannot be loaded; empty if they can.

    Loading a truncated library would end the process.
    """
    try:
        expected = _sizes(root)
        found = {name: (root / name).stat().st_size for name in expected}
    except (OSError, ValueError) as error:
        return str(error)
    wrong = [name for name in expected if found[name] != expected[name]]
    return f"{root / wrong[0]} has {found[wrong[0]]} bytes of {expected[wrong[0]]}" if wrong else ""


def seal(root: Path) -> None:
    """Write the sizes of all compiled files in `root`, for `damage`."""
    sizes = {str(file.relative_to(root)): file.stat().st_size for file in root.rglob(f"*{EXTENSION_SUFFIXES[0]}")}
    (root / SIZES).write_text(json.dumps(sizes))


def _sizes(root: Path) -> dict[str, int]:
    """Return the bytes of each compiled file in `root`, by its path there."""
    sizes: dict[str, int] = json.loads((root / SIZES).read_text())
    return sizes


class _Finder(MetaPathFinder):
    """Finds the compiled modules in `root` and the library that they share; nothing else."""

    def __init__(self, root: Path) -> None:
        suffix = EXTENSION_SUFFIXES[0]
        self._files = {name.removesuffix(suffix).replace(os.sep, "."): str(root / name) for name in _sizes(root)}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)
