"""One Ray with four warm actors serves all tests of this room."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import httpx2
import pytest

from gapless.launch.ray_launcher import RayLauncher
from tests.support.tiers import HANGS_S

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; commands started here inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
for part in ("connect", "read", "write", "pool"):  # 5 s by default, within which a busy machine may not answer
    setattr(httpx2._config.DEFAULT_TIMEOUT_CONFIG, part, HANGS_S)


@pytest.fixture(scope="session")
def ray_launcher() -> Iterator[RayLauncher]:
    launcher = RayLauncher(keep=True)
    yield launcher
    launcher.shutdown()
