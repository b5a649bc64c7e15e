"""A line for a run on CPUs of a machine that has an NVIDIA GPU."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from ..conf.schema import EngineConfig
from .oversubscription import are_here


def unused_gpu(config: EngineConfig, devices: Path = Path("/dev"), torch: str | None = None) -> str | None:
    """Return one line that says why a GPU of this machine is idle and how to use it; torch is not imported.

    Args:
        config: of the run.
        devices: the folder of the device files: `nvidia0`, and `dxg` under WSL.
        torch: its version; None: the installed one.

    Returns:
        None if there is no GPU, the run uses it, or its ranks may be elsewhere.
    """
    if config.hardware.device != "cpu" or not are_here(config.parallel):
        return None
    found = sorted(path.name for pattern in ("nvidia[0-9]*", "dxg") for path in devices.glob(pattern))
    if not found:
        return None
    version = torch or metadata.version("torch")
    has_cuda = not version.endswith("+cpu")
    how = "hardware=h100 or hardware.device=cuda uses it" if has_cuda else "docs/install.md has the build for CUDA"
    why = f"hardware={config.hardware.name}" if has_cuda else f"torch {version} has no CUDA"
    return f"this machine has a GPU ({found[0]}), and this run computes on the CPU ({why}): {how}"
