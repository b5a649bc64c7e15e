"""Ranks start while strangers hold the control port."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import pytest

from gapless import LLM
from gapless.conf.clusters import ClusterConfig
from gapless.conf.schema import HardwareConfig, ParallelConfig
from gapless.launch.ray_launcher import RayLauncher
from gapless.parallel.control import Endpoint
from tests.support.strangers import Strangers


class _Crowded:
    """Starts ranks by `launcher`, with 100 strangers at the control port."""

    def __init__(self, launcher: RayLauncher, strangers: ExitStack) -> None:
        self._launcher = launcher
        self._strangers = strangers

    def start(
        self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig, cluster: ClusterConfig
    ) -> None:
        self._strangers.enter_context(Strangers(endpoint, 100))
        self._launcher.start(endpoint, parallel, hardware, cluster)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)


def _seconds_to_start(launcher: Any) -> float:
    start = time.monotonic()
    with LLM("tiny", pp=2, launcher=launcher, **{"parallel.threads": 1}) as llm:
        seconds = time.monotonic() - start
        assert len(llm.generate([[1, 2, 3]])) == 1
    return seconds


@pytest.mark.slow
def test_ranks_start_beside_strangers(ray_launcher: RayLauncher) -> None:
    _seconds_to_start(ray_launcher)  # Ray and its actors
    usual = _seconds_to_start(ray_launcher)
    with ExitStack() as strangers:
        assert _seconds_to_start(_Crowded(ray_launcher, strangers)) < 10 * usual
