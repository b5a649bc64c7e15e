"""Finds the line of the user's own code (a policy file, a launcher of another package) in which an error arose."""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import entry_points

from ..conf.policy_file import MODULE_PREFIX


def blame(error: BaseException) -> str | None:
    """Write `file:line: Class: message` for an error that passed through a plug-in; None where it passed through
    none."""
    files = _files()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not frames:
        return None
    last = frames[-1]
    return f"{last.filename}:{last.lineno}: in {last.name}: {type(error).__name__}: {error}"


def _files() -> set[str]:
    """Return the files of the plug-ins that are loaded."""
    named = {entry.module for entry in entry_points(group="gapless.launchers")}
    return {
        file
        for name, module in list(sys.modules.items())
        if (name.startswith(MODULE_PREFIX) or name in named) and not name.startswith("gapless.")
        if (file := getattr(module, "__file__", None))
    }
