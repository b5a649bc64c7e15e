"""The control path as compiled code, where `python -m gapless.launch.compile` has made it; else the sources run.

What is compiled lies in the user's cache, in a folder named by a hash of the sources: an edited source is run as it
stands, never shadowed by what was compiled of it before. `GAPLESS_COMPILED=0` runs the sources in any case.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import version
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

# What each micro-batch passes through, by name within `gapless.runtime`. Left out are functions that take arrays as
# well as numbers, and msgspec's structs.
MODULES = (
    "core.block_pool",
    "core.columns",
    "core.features",
    "core.micro_batch",
    "core.request",
    "core.request_record",
    "cost.analytic",
    "cost.attention",
    "cost.stage_costs",
    "engine.coordinator",
    "scheduler.base",
    "scheduler.groups",
    "scheduler.learned.backlog",
    "scheduler.learned.chunk_picker",
    "scheduler.learned.saturation",
    "scheduler.learned.turnaround",
    "scheduler.policies.equal_time",
    "scheduler.policies.orca_best",
    "scheduler.policies.orca_worst",
    "scheduler.policies.prefill_first",
    "scheduler.policies.request_level",
    "scheduler.policies.sarathi",
    "scheduler.policies.token_budget",
    "scheduler.policies.token_throttle",
    "simulation.pipeline",
    "simulation.replicas",
)
_KNOWN = (  # whose types they were compiled by
    "core.messages", "core.run_record", "cost.operators", "pipeline.protocol", "scheduler.learned.stage_times",
)  # fmt: skip
_FORM = "2"  # of the folder
LIBRARY = "gapless_control__mypyc"  # what all of them share
SIZES = "sizes.json"  # of the files of a folder
_SOURCES = Path(__file__).parent
_DAY = 86_400.0  # s
_KEPT = 30 * _DAY  # what nothing has run for so long goes when something is compiled


def source(module: str) -> Path:
    return _SOURCES.joinpath(*module.split(".")).with_suffix(".py")


def folder() -> Path:
    """Where the compiled twin of these sources lies, or would lie.

    Raises:
        OSError, RuntimeError: a source or the user's home cannot be read.
    """
    digest = hashlib.sha256(f"{_FORM} {EXTENSION_SUFFIXES[0]} {sys.version} librt {version('librt')}".encode())
    for module in (*MODULES, *_KNOWN):
        digest.update(source(module).read_bytes())
    return _cache() / digest.hexdigest()[:20]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gapless"


def in_use() -> bool:
    """Whether this process runs compiled code."""
    return LIBRARY in sys.modules


def install() -> None:
    """Let imports find the compiled modules, where these sources have been compiled."""
    if os.environ.get("GAPLESS_COMPILED") == "0" or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    try:
        root = folder()
    except (OSError, RuntimeError):
        return
    if not root.is_dir():
        return
    if why := damage(root):
        text = f"the sources run, their compiled twin is damaged: {why}; python -m gapless.launch.compile mends it"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    else:
        sys.meta_path.insert(0, _Finder(root))
        _note_use(root)


def _note_use(root: Path) -> None:
    """For `unused`, once a day."""
    try:
        if time.time() - (root / SIZES).stat().st_mtime > _DAY:
            os.utime(root / SIZES)
    except OSError:  # read only
        pass


def unused() -> list[Path]:
    """Folders of compiled code, of other sources or Pythons, that nothing has run for a month."""
    found = []
    for root in _cache().iterdir() if _cache().is_dir() else ():
        file = root / SIZES
        if re.fullmatch("[0-9a-f]{20}", root.name) and root.is_dir():
            with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
                used = (file if file.exists() else root).stat().st_mtime
                if time.time() - used > _KEPT:
                    found.append(root)
    return found


def damage(root: Path) -> str:
    """What keeps the compiled modules in `root` from being loaded; empty where nothing does. To load a library that was
    cut short would end the process."""
    try:
        told = json.loads((root / SIZES).read_text())
        found = {name: (root / name).stat().st_size for name in told}
    except (OSError, ValueError) as error:
        return str(error)
    wrong = [name for name in told if found[name] != told[name]]
    return f"{root / wrong[0]} has {found[wrong[0]]} bytes of {told[wrong[0]]}" if wrong else ""


def seal(root: Path) -> None:
    """Note in `root` what has been compiled there, for `damage`."""
    sizes = {str(file.relative_to(root)): file.stat().st_size for file in root.rglob(f"*{EXTENSION_SUFFIXES[0]}")}
    (root / SIZES).write_text(json.dumps(sizes))


class _Finder(MetaPathFinder):
    """Finds the compiled modules in `root` and what they share; nothing else."""

    def __init__(self, root: Path) -> None:
        names = [LIBRARY, *(f"{__package__}.{module}" for module in MODULES)]
        self._files = {name: f"{root.joinpath(*name.split('.'))}{EXTENSION_SUFFIXES[0]}" for name in names}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)
