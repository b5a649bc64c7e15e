"""A GPU that a run leaves idle is named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapless.conf.schema import GenerateConfig
from gapless.launch.compose import compose_one
from gapless.launch.unused_gpu import unused_gpu


@pytest.mark.parametrize(
    ("device", "version", "words"),
    [
        ("nvidia0", "2.9.0+cpu", ("nvidia0", "torch 2.9.0+cpu has no CUDA", "docs/install.md")),
        ("nvidia12", "2.9.0+cu128", ("nvidia12", "hardware=cpu", "hardware=h100")),
        ("dxg", "2.9.0", ("dxg", "hardware.device=cuda")),
    ],
)
def test_an_idle_gpu_is_named(tmp_path: Path, device: str, version: str, words: tuple[str, ...]) -> None:
    (tmp_path / device).touch()
    line = unused_gpu(compose_one([], GenerateConfig, "generate"), tmp_path, version)
    assert line is not None
    assert all(word in line for word in words)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("files", "overrides"),
    [
        (["null", "nvidiactl", "nvidia-uvm"], []),
        (["nvidia0"], ["hardware=h100"]),
        (["nvidia0"], ["parallel=pp2", "parallel.ray_address=10.0.0.1:6379"]),
    ],
)
def test_nothing_is_said_where_there_is_none_or_it_is_used(
    tmp_path: Path, files: list[str], overrides: list[str]
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert unused_gpu(compose_one(overrides, GenerateConfig, "generate"), tmp_path, "2.9.0+cpu") is None
