"""A Ray address where nothing listens is one line, at once."""

from __future__ import annotations

import socket

import pytest

from gapless.conf.errors import ConfigError
from gapless.conf.schema import HardwareConfig, ParallelConfig
from gapless.launch.ray_launcher import RayLauncher


def test_a_given_address_must_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        parallel = ParallelConfig(pp=2, launcher="ray", ray_address=address)
        RayLauncher().check(parallel, HardwareConfig())
    with pytest.raises(ConfigError, match=rf"^parallel\.ray_address={address}: nothing answers there"):
        RayLauncher().check(parallel, HardwareConfig())


@pytest.mark.parametrize("address", [None, "auto"])
def test_an_address_that_ray_finds_by_itself_is_not_asked(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    RayLauncher().check(ParallelConfig(pp=2, launcher="ray", ray_address=address), HardwareConfig())
