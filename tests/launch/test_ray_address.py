"""A Ray address where nothing listens, or something else than Ray, is one line within seconds."""

from __future__ import annotations

import socket
import time

import pytest
import ray

from gapless import LLM
from gapless.conf.errors import ConfigError
from gapless.conf.schema import HardwareConfig, ParallelConfig
from gapless.launch.ray_launcher import RayLauncher
from tests.support.tiers import stretched


@pytest.mark.slow
def test_a_given_address_must_answer_as_ray_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and says nothing
        address = f"127.0.0.1:{server.getsockname()[1]}"
        parallel = ParallelConfig(pp=2, launcher="ray", ray_address=address)
        begin = time.monotonic()
        with pytest.raises(
            ConfigError, match=rf"^parallel\.ray_address={address}: what answers there is not Ray's GCS"
        ):
            RayLauncher().check(parallel, HardwareConfig())
        assert time.monotonic() - begin < stretched(5)
    with pytest.raises(ConfigError, match=rf"^parallel\.ray_address={address}: nothing answers there"):
        RayLauncher().check(parallel, HardwareConfig())


@pytest.mark.slow
def test_ray_itself_is_let_through(ray_launcher: RayLauncher) -> None:
    LLM("tiny", pp=2, launcher=ray_launcher, **{"parallel.threads": 1}).close()
    address = ray.get_runtime_context().gcs_address
    RayLauncher().check(ParallelConfig(pp=2, launcher="ray", ray_address=address), HardwareConfig())


@pytest.mark.parametrize("address", [None, "auto"])
def test_an_address_that_ray_finds_by_itself_is_not_asked(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    RayLauncher().check(ParallelConfig(pp=2, launcher="ray", ray_address=address), HardwareConfig())
