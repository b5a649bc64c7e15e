"""One Ray with four warm actors serves all tests of this room."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless.launch.ray_launcher import RayLauncher

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def ray_launcher() -> Iterator[RayLauncher]:
    launcher = RayLauncher(keep=True)
    yield launcher
    launcher.shutdown()
