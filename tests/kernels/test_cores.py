"""Threads follow what the machine gives a process: affinity, hardware threads, slow cores, quotas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gapless.kernels import cores
from tests.support.tiers import HANGS_S


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def per_cpu(name: str, *values: object) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{cpu}/{name}": str(value) for cpu, value in enumerate(values)}


SIBLINGS = "topology/thread_siblings_list"
FREQUENCY = "cpufreq/cpuinfo_max_freq"
# Eight hyper-threaded P-cores and eight E-cores, as Linux numbers them on a Core i9-12900K.
ALDER_LAKE = (
    per_cpu(SIBLINGS, *(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" for cpu in range(16)), *range(16, 24))
    | per_cpu(FREQUENCY, *[5_100_000] * 16, *[3_900_000] * 8)
    | {"sys/devices/cpu_core/cpus": "0-15", "sys/devices/cpu_atom/cpus": "16-23"}
)
EPYC = per_cpu(SIBLINGS, *(f"{cpu % 64},{cpu % 64 + 64}" for cpu in range(128)))
M1 = per_cpu("cpu_capacity", *[460] * 4, *[1024] * 4)
STRIX_POINT = per_cpu(SIBLINGS, *(f"{cpu % 12},{cpu % 12 + 12}" for cpu in range(24))) | per_cpu(
    FREQUENCY, *([5_157_000] * 4 + [3_300_000] * 8) * 2
)
FAVORED = per_cpu(FREQUENCY, *(5_100_000 - 50_000 * core for core in range(16)))


@pytest.mark.parametrize(
    ("files", "allowed", "count", "words"),
    [
        ({}, range(4), 4, "4 cores"),
        ({}, [3], 1, "1 core"),
        (per_cpu("cpu_capacity", 1024, 1024), range(8), 8, "8 cores"),  # not known of all
        (per_cpu("cpu_capacity", *[1024] * 4), range(4), 4, "4 cores"),  # Raspberry Pi 5
        (per_cpu("cpu_capacity", *[530] * 4, *[1024] * 4), range(8), 4, "4 fast ones of 8 cores"),  # RK3588
        (M1, range(8), 4, "4 fast ones of 8 cores"),
        (M1, range(4), 4, "4 cores"),  # bound to the slow ones
        (ALDER_LAKE, range(24), 8, "8 fast ones of 16 cores"),
        (ALDER_LAKE, range(16, 24), 8, "8 cores"),
        (EPYC, range(128), 64, "64 cores"),
        (EPYC, [0, 64, 1], 2, "2 cores"),
        (STRIX_POINT, range(24), 12, "12 cores"),  # the slower ones have two thirds of the clock, and are twice as many
        (FAVORED, range(16), 16, "16 cores"),
    ],
)
def test_threads_are_as_many_as_fast_cores(
    files: dict[str, str], allowed: list[int], count: int, words: str, tmp_path: Path
) -> None:
    write(tmp_path, files)
    found = cores.find(tmp_path, allowed)
    assert (found.count, str(found)) == (count, words)
    assert frozenset().union(*found.cpus) <= set(allowed)


V2 = {"proc/self/cgroup": "0::/system.slice/docker-ab.scope"}
V1 = {"proc/self/cgroup": "5:devices:/docker/ab\n4:cpu,cpuacct:/docker/ab\n3:cpuset:/docker/ab\n0::/docker/ab"}
GROUP = "sys/fs/cgroup/system.slice"
OLD = "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("files", "count", "words"),
    [
        (V2 | {f"{GROUP}/docker-ab.scope/cpu.max": "100000 100000"}, 1, "64 cores, CPU quota 1"),
        (V2 | {f"{GROUP}/docker-ab.scope/cpu.max": "max 100000"}, 64, "64 cores"),
        (V2 | {f"{GROUP}/cpu.max": "250000 50000", f"{GROUP}/docker-ab.scope/cpu.max": "max 100000"}, 5, None),
        (V2 | {f"{GROUP}/cpu.max": "250000 50000", f"{GROUP}/docker-ab.scope/cpu.max": "300000 100000"}, 3, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1, "64 cores, CPU quota 0.5"),
        ({"proc/self/cgroup": "0::/../../other", "sys/fs/cgroup/cpu.max": "170000 100000"}, 2, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/unified/cpu.max": "400000 100000"}, 4, None),
        (V1 | {f"{OLD}/docker/ab/cpu.cfs_quota_us": "200000", f"{OLD}/docker/ab/cpu.cfs_period_us": "100000"}, 2, None),
        # In a container the path is the host's, and its own group is mounted as the root.
        (V1 | {f"{OLD}/cpu.cfs_quota_us": "300000", f"{OLD}/cpu.cfs_period_us": "100000"}, 3, None),
        (V1 | {f"{OLD}/cpu.cfs_quota_us": "-1", f"{OLD}/cpu.cfs_period_us": "100000"}, 64, "64 cores"),
    ],
)
def test_a_quota_bounds_threads(files: dict[str, str], count: int, words: str | None, tmp_path: Path) -> None:
    write(tmp_path, EPYC | files)
    found = cores.find(tmp_path, range(128))
    assert found.count == count
    assert words is None or str(found) == words


def test_ranks_of_a_node_share_its_cores() -> None:
    count = cores.find().count
    assert 1 <= count <= len(os.sched_getaffinity(0))
    assert [cores.threads(ranks) for ranks in (1, 2, 10_000)] == [count, max(1, count // 2), 1]


BIND = """
import os, sys, threading
from pathlib import Path
from gapless.kernels import cores
cores.pin(int(sys.argv[2]), Path(sys.argv[1]))
thread = threading.Thread(target=lambda: print(sorted(os.sched_getaffinity(0))))
thread.start()
thread.join()
assert "torch" not in sys.modules
"""


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < max(2, os.cpu_count() or 1), reason="the tests may use some cores only"
)
@pytest.mark.parametrize(
    ("threads", "environment", "slow", "is_bound"),
    [
        (1, {}, 300, True),
        (64, {}, 300, False),
        (1, {"OMP_PROC_BIND": "true"}, 300, False),
        (1, {}, 1024, False),
    ],
)
def test_threads_stay_on_the_fast_cores_unless_a_user_binds_them(
    threads: int, environment: dict[str, str], slow: int, is_bound: bool, tmp_path: Path
) -> None:
    every = sorted(os.sched_getaffinity(0))
    write(tmp_path, per_cpu("cpu_capacity", 1024, *[slow] * (len(every) - 1)))
    command = [sys.executable, "-c", BIND, str(tmp_path), str(threads)]
    env = os.environ | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S, check=True)
    assert done.stdout.strip() == str([0] if is_bound else every)
