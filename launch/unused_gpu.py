"""A hint for CPU runs on a machine with an NVIDIA GPU."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from ..conf.schema import EngineConfig
from .oversubscription import are_here


def unused_gpu(config: EngineConfig, devices: Path = Path("/dev"), torch: str | None = None) -> str | None:
    """Return a one-line hint why a GPU is unused and how to use it, without importing torch.

    Args:
        config: the run's config.
        devices: folder of device files: `nvidia0`, and `dxg` under WSL.
        torch: version; None: the installed one.

    Returns:
        None if there is no GPU, the run uses it, or its ranks may run elsewhere.
    """
    if config.hardware.device != "cpu" or not are_here(config.parallel):
        return None
    found = sorted(path.name for pattern in ("nvidia[0-9]*", "dxg") for path in devices.glob(pattern))
    if not found:
        return None
    version = torch or metadata.version("torch")
    has_cuda = not version.endswith("+cpu")
    how = "hardware=h100 or hardware.device=cuda uses it" if has_cuda else "see docs/install.md for the CUDA build"
    why = f"hardware={config.hardware.name}" if has_cuda else f"torch {version} has no CUDA"
    return f"this run uses the CPU ({why}), but the machine has a GPU ({found[0]}): {how}"
