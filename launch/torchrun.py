"""Ranks that torchrun started: `torchrun --nproc-per-node 4 -m gapless.launch.torchrun generate [overrides]`.

Every process is one rank. The first one's process drives as the coordinator, and its rank runs as a child beside it,
so that the control loop never shares an interpreter with a stage.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from typing import Any

from ..conf.errors import ConfigError
from ..conf.schema import HardwareConfig, ParallelConfig
from ..parallel.control import Endpoint
from ..parallel.openmp import choose_waiting

_KEY = "gapless/endpoint"
_RANK_ENV = "GAPLESS_RANK"  # a JSON object for the child that serves as a rank
_STORE_IS_OPEN = "TORCHELASTIC_USE_AGENT_STORE"  # torch's variable: the first rank has not to open it
_TIMEOUT_S = 600.0
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class TorchrunLauncher:
    """Sends the address of the coordinator to ranks that exist already."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, parallel: ParallelConfig, hardware: HardwareConfig) -> None:
        world = parallel.world_size
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ConfigError(
                f"parallel.launcher=torchrun: start it as `torchrun --nproc-per-node {world} "
                "-m gapless.launch.torchrun COMMAND ...`"
            )
        if int(os.environ["WORLD_SIZE"]) != world:
            raise ConfigError(
                f"parallel.pp={parallel.pp} x parallel.tp={parallel.tp} makes {world} ranks; "
                f"torchrun started {os.environ['WORLD_SIZE']}"
            )

    def start(self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig) -> None:
        address = {
            "endpoint": asdict(endpoint),
            "device": hardware.device,
            "timeout_s": parallel.start_timeout_s,
        }
        _store().set(_KEY, json.dumps(address))
        env = os.environ | {_RANK_ENV: json.dumps(address)}
        self._child = subprocess.Popen([sys.executable, "-m", "gapless.launch.torchrun"], env=env)

    @property
    def can_replace(self) -> bool:
        return False  # when one of its processes ends, torchrun ends all

    def replace(self, ranks: Collection[int], endpoint: Endpoint) -> None:
        raise AssertionError(f"torchrun does not start {ranks} again")

    def poll(self) -> dict[int, str]:
        code = None if self._child is None else self._child.poll()
        if code is None:
            return {}
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return {0: f"its process ended {how}"}

    def stop(self) -> None:
        if self._child is None:
            return
        try:
            self._child.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child = None


@cache
def _store() -> Any:
    """Return the store through which torchrun's processes find each other.

    Where torchrun leaves it to the first rank to open that store, it listens at the address that torchrun names. By
    itself it would listen at all addresses.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=_TIMEOUT_S)
    if os.environ["RANK"] != "0" or os.environ.get(_STORE_IS_OPEN) == "True":
        return next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = socket.create_server((host, port), backlog=1024)
    world = int(os.environ["WORLD_SIZE"])
    os.environ[_STORE_IS_OPEN] = "True"  # for a child of this process, as a server's engine
    return dist.TCPStore(host, port, world, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def _serve(address: dict[str, Any]) -> None:
    from ..runtime.pipeline.rank import run_rank

    local = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local}" if address["device"] == "cuda" else "cpu"
    run_rank(Endpoint(**address["endpoint"]), int(os.environ["RANK"]), device, address["timeout_s"])


def _end_with_parent() -> None:
    """Have the kernel end this process when torchrun's agent dies. Only Linux can.

    The driver gets SIGTERM, since it has a report to write; a rank gets SIGKILL, which ends a stopped one too.
    """
    is_driver = os.environ.get("RANK") == "0" and _RANK_ENV not in os.environ
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM if is_driver else signal.SIGKILL)


def main() -> int:
    _end_with_parent()
    choose_waiting()
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if _RANK_ENV in os.environ:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides
        _serve(json.loads(os.environ[_RANK_ENV]))
        return 0
    if "RANK" not in os.environ:
        print(
            "gapless: error: start it as `torchrun --nproc-per-node N -m gapless.launch.torchrun COMMAND ...`",
            file=sys.stderr,
        )
        return 2
    if os.environ["RANK"] != "0":
        for number in (signal.SIGINT, signal.SIGTERM):  # torchrun passes them to all; the coordinator may drain first
            signal.signal(number, signal.SIG_IGN)
        address = json.loads(_store().get(_KEY))
        if address is not None:
            _serve(address)
        return 0
    return _drive()


def _drive() -> int:
    from .cli import main as cli

    store = _store()
    try:
        return cli([*sys.argv[1:], "parallel.launcher=torchrun"])
    finally:
        with suppress(RuntimeError):  # torchrun's agent is gone, and its store
            if not store.check([_KEY]):
                store.set(_KEY, "null")  # nothing was started: the other ranks go home


if __name__ == "__main__":
    from gapless.launch.torchrun import main as run  # the module that the launcher is of, so that both share the store

    sys.exit(run())
