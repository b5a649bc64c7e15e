"""With the default host, everything that listens during a run is on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gapless import LLM
from gapless.launch.ray_launcher import RayLauncher
from tests.launch.test_torchrun import GENERATE
from tests.support.listeners import listeners_of
from tests.support.processes import descendants_of
from tests.support.tiers import HANGS_S

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LOOPBACK = ("127.0.0.1", "::1")


def open_to_others(pid: int) -> dict[tuple[str, int], str]:
    found = listeners_of([pid, *descendants_of(pid)])
    assert found, "nothing listens"
    return {address: process for address, process in found.items() if address[0] not in LOOPBACK}


@pytest.mark.slow
def test_ray_and_its_ranks_listen_on_loopback(ray_launcher: RayLauncher) -> None:
    with LLM("tiny", pp=2, launcher=ray_launcher, **{"parallel.threads": 1}) as llm:
        llm.generate([[1, 2, 3]])
        assert open_to_others(os.getpid()) == {}


@pytest.mark.slow
def test_another_host_is_the_only_address_of_the_ranks_and_is_warned_of_once(
    ray_launcher: RayLauncher, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no other address than loopback")
        host = sock.getsockname()[0]
    for _ in range(2):
        with LLM("tiny", pp=2, launcher=ray_launcher, **{"parallel.threads": 1, "parallel.host": host}) as llm:
            llm.generate([[1, 2, 3]])
            assert {address for address, _ in open_to_others(os.getpid())} <= {host}
    (warning,) = (record for record in caplog.records if record.name.startswith("gapless."))
    assert f"parallel.host={host}" in warning.message


def torchrun(options: list[str], tmp_path: Path, **env: str) -> dict[tuple[str, int], str]:
    """Run two ranks under torchrun and return what listens on more than loopback while they compute."""
    run = ["parallel=pp2", "prompt=x", "sampling.max_tokens=2000", "sampling.ignore_eos=true"]
    command = [*TORCHRUN, *options, "--nproc-per-node", "2", *GENERATE, *run]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ | env
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "tok/s" in line:
                return open_to_others(process.pid)
        raise AssertionError("".join(lines))
    finally:
        process.terminate()
        process.communicate(timeout=HANGS_S)


@pytest.mark.slow
def test_under_torchrun_its_agent_alone_is_open(tmp_path: Path) -> None:
    assert {process.split()[0] for process in torchrun(["--standalone"], tmp_path).values()} == {"pt_elastic"}


@pytest.mark.slow
def test_torchrun_with_a_file_as_its_store_is_closed(tmp_path: Path) -> None:
    options = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--local-addr", "127.0.0.1"]
    assert torchrun(options, tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") == {}
