"""A Ray address where nothing listens, or something else than Ray, is one line within seconds."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import ray
from ray._private import services

from gapless import LLM
from gapless.conf.errors import ConfigError
from gapless.conf.schema import HardwareConfig, ParallelConfig
from gapless.launch.ray_launcher import RayLauncher
from tests.support.forked import gapless


@pytest.mark.slow
def test_a_given_address_must_answer_as_ray_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and says nothing
        address = f"127.0.0.1:{server.getsockname()[1]}"
        parallel = ParallelConfig(pp=2, launcher="ray", ray_address=address)
        with pytest.raises(ConfigError, match=rf"^parallel\.ray_address={address}: the server there is not Ray's GCS"):
            RayLauncher().check(parallel, HardwareConfig())
    with pytest.raises(ConfigError, match=rf"^parallel\.ray_address={address}: nothing responds there"):
        RayLauncher().check(parallel, HardwareConfig())


@pytest.mark.slow
def test_ray_itself_is_let_through(ray_launcher: RayLauncher) -> None:
    LLM("tiny", pp=2, launcher=ray_launcher, **{"parallel.threads": 1}).close()
    address = ray.get_runtime_context().gcs_address
    RayLauncher().check(ParallelConfig(pp=2, launcher="ray", ray_address=address), HardwareConfig())


def test_without_an_address_none_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    RayLauncher().check(ParallelConfig(pp=2, launcher="ray"), HardwareConfig())


@pytest.mark.parametrize(
    ("file", "line"),
    [("127.0.0.1:{}", r" \(.*:{}\): nothing responds there .*; start Ray there"), (None, ": no Ray runs")],
)
def test_auto_stands_for_a_ray_that_answers(
    file: str | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray notes the last cluster in a file, which outlives it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "ray").mkdir()
    if file is not None:
        (tmp_path / "ray" / "ray_current_cluster").write_text(file.format(port))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", frozenset)  # the Rays of other tests run on this machine
    with pytest.raises(ConfigError, match=rf"^parallel\.ray_address=auto{line.format(port)}"):
        RayLauncher().check(ParallelConfig(pp=2, launcher="ray", ray_address="auto"), HardwareConfig())


@pytest.mark.slow
def test_ranks_import_what_the_command_imports(tmp_path: Path) -> None:
    """Ray would have its workers import from the working directory first."""
    for name in ("torch", "numpy", "msgspec", "ray", "gapless"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('this is the user's {name}')\n")
    words = ["prompt=x", "model=tiny", "parallel=pp2", "parallel.threads=1", "sampling.max_tokens=2"]
    done = gapless("generate", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
