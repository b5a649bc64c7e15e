"""Reports versions, the device, and which attention backends run on it."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_type_hints

import torch

import gapless
from gapless.conf.errors import ConfigError
from gapless.conf.schema import ModelConfig
from gapless.kernels.operators.select import make_kernels
from gapless.models.attention.backend import AttentionBackend, AttentionSizes
from gapless.models.attention.sdpa import SdpaBackend
from gapless.models.attention.select import make_backend

from .parts import Task
from .rows import Row, missing

PACKAGES = ("torch", "triton", "xformers", "megatron-core", "transformers", "numpy")


def backend_names(device: str) -> list[str]:
    """Return the values of `model.attention` for a device except `auto`; each must run."""
    names = [name for name in get_args(get_type_hints(ModelConfig)["attention"]) if name != "auto"]
    return names if device == "cuda" else [name for name in names if name == "sdpa"]


def backend(
    name: str,
    device: str,
    *,
    head_dim: int,
    num_blocks: int,
    block_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Make a backend as a stage does.

    Raises:
        ConfigError: it does not run here.
    """
    where = torch.device(device)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    return make_backend(
        name,
        make_kernels("auto", dtype=dtype, device=where),
        AttentionSizes(
            block_size=block_size, num_blocks=num_blocks, window=window, dtype=dtype, device=where, head_dim=head_dim
        ),
    )


def is_expected(name: str) -> bool:
    """Return whether a backend must run; xformers only if installed, with torch for CUDA 12 like its wheel."""
    return name != "xformers" or (str(torch.version.cuda).startswith("12.") and find_spec("xformers") is not None)


def versions(task: Task) -> Iterator[Row]:
    """List versions and the device, then try each attention backend; one that does not run is a failure."""
    yield _fact("Python", f"{platform.python_version()}, {platform.platform()}")
    yield _fact("gapless", ", ".join(sorted({str(Path(path)) for path in gapless.__path__})))
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "absent"
        yield _fact(package, version)
    if task.device == "cuda":
        yield from _device()
    for name in backend_names(task.device):
        for head_dim in (64, 128):
            setting = f"{name}, heads of {head_dim}"
            try:
                made = backend(name, task.device, head_dim=head_dim, num_blocks=8)
            except ConfigError as error:
                if is_expected(name):
                    yield missing("versions", "attention", setting, str(error))
                else:
                    yield Row(part="versions", quantity="attention", setting=setting, status="skip", note=str(error))
                continue
            yield _runs("attention", setting, made)
    made = backend("auto", task.device, head_dim=128, num_blocks=8)
    if isinstance(made, SdpaBackend) and task.device == "cuda":
        yield missing("versions", "attention", "auto", "SdpaBackend: no fast backend runs here")
    else:
        yield _runs("attention", "auto", made)
    where = torch.device(task.device)
    kernels = set(get_args(get_type_hints(ModelConfig)["kernels"])) - {"cpp"} if where.type == "cuda" else {"auto"}
    for name in sorted(kernels):
        try:
            yield _runs("kernels", name, make_kernels(name, dtype=torch.bfloat16, device=where))
        except ConfigError as error:
            yield missing("versions", "kernels", name, str(error))


def _device() -> Iterator[Row]:
    device = torch.cuda.get_device_properties(0)
    yield _fact("device", f"{device.name}, sm_{device.major}{device.minor}, {torch.cuda.device_count()} there")
    yield Row(part="versions", quantity="multiprocessors", value=device.multi_processor_count)
    yield Row(part="versions", quantity="memory (GiB)", value=device.total_memory / 2**30)
    yield Row(part="versions", quantity="memory that is free (GiB)", value=torch.cuda.mem_get_info()[0] / 2**30)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield _fact("CUDA and NCCL of torch", f"{torch.version.cuda}, {nccl}")
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        yield _fact("driver", done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        yield _fact("driver", f"nvidia-smi does not say: {error}"[:120])


def _runs(quantity: str, setting: str, made: object) -> Row:
    note = getattr(made, "about", "") or type(made).__name__
    return Row(part="versions", quantity=quantity, setting=setting, status="ok", note=note)


def _fact(quantity: str, note: str) -> Row:
    return Row(part="versions", quantity=quantity, note=note)
