"""One Ray with four warm actors serves all tests of this room."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from gapless.launch.ray_launcher import RayLauncher

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; commands started here inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_launcher() -> Iterator[RayLauncher]:
    launcher = RayLauncher(keep=True)
    yield launcher
    launcher.shutdown()
