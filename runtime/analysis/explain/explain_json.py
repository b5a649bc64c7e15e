"""`explain.json`: the explanation of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ....conf.errors import ConfigError, reason
from ...core.whole_file import write_text
from ..run_folder.files import EXPLANATION
from .explanation import Explanation


def write_explanation(folder: Path, explanation: Explanation) -> Path:
    """Write the explanation into a folder and return the file."""
    path = folder / EXPLANATION
    write_text(path, msgspec.json.format(msgspec.json.encode(explanation), indent=1).decode() + "\n")
    return path


def read_explanation(folder: Path) -> Explanation | None:
    """Read a folder's explanation; None if it has none.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / EXPLANATION
    try:
        return msgspec.json.decode(path.read_bytes(), type=Explanation)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # msgspec's errors are ValueError too
        raise ConfigError(f"{path}: damaged, or not written by gapless ({reason(error)})") from error
