"""The hint for a machine with too few free cores, and how threads wait there."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from gapless.launch import oversubscription
from gapless.parallel.openmp import others_running, waiting
from tests.support.tiers import HANGS_S


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "load", "expected"),
    [
        (1, None, 2, 0.2, None),
        (4, None, 8, 5.9, None),
        (2, 2, 2, 0.0, "4 threads for 2 cores; parallel.threads=1 may be faster"),
        (4, None, 2, 0.0, "4 threads for 2 cores; fewer ranks may be faster"),
        (
            1,
            None,
            2,
            2.04,
            "the machine is busy (load 2.0 on 2 cores), so times will vary; parallel.threads=1 may be faster",
        ),
        (2, None, 2, 2.0, "the machine is busy (load 2.0 on 2 cores), so times will vary"),
    ],
)
def test_what_is_short_is_said(ranks: int, threads: int | None, cores: int, load: float, expected: str | None) -> None:
    assert oversubscription._hint(ranks, threads, cores, load) == expected


@pytest.mark.parametrize("user", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "0"}, {}])
def test_threads_wait_as_the_user_says_or_as_the_machine_bears(user: dict[str, str]) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    env = {name: value for name, value in os.environ.items() if name not in names} | user
    code = f"import os, sys, gapless.runtime; assert 'torch' not in sys.modules; print([os.getenv(n) for n in {names}])"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    chosen = [user] if user else [{"OMP_WAIT_POLICY": "passive"}, {"GOMP_SPINCOUNT": "10000"}]
    assert done.stdout.strip() in [str([each.get(name) for name in names]) for each in chosen]


def test_threads_spin_only_where_cores_are_free() -> None:
    assert waiting(0, 4, 4) == {"GOMP_SPINCOUNT": "10000"}
    assert waiting(1, 4, 4) == waiting(4, 4, 4) == {"OMP_WAIT_POLICY": "passive"}
    assert waiting(1, 4, 5) == waiting(3, 1, 4) == {"GOMP_SPINCOUNT": "10000"}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            time.sleep(0.5)
            assert others_running() >= 1
        finally:
            busy.kill()
