"""Locates errors in plug-ins: policy files and launchers of other packages."""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import entry_points

from ..conf.policy_file import MODULE_PREFIX


def blame(error: BaseException) -> str | None:
    """Return `file:line: in Class.method: Error: message` for an error raised in a plug-in, else None."""
    files = _files()
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename in files:
            found = f"{frame.f_code.co_filename}:{line}: in {frame.f_code.co_qualname}"
    return f"{found}: {type(error).__name__}: {error}" if found else None


def _files() -> set[str]:
    """Return the files of loaded plug-ins."""
    packages = {entry.module.partition(".")[0] for entry in entry_points(group="gapless.launchers")} - {"gapless"}
    return {
        file
        for name, module in list(sys.modules.items())
        if name.startswith(MODULE_PREFIX) or name.partition(".")[0] in packages
        if (file := getattr(module, "__file__", None))
    }
