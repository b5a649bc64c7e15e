"""Ranks started by torchrun: `torchrun --nproc-per-node 4 -m gapless.launch.torchrun generate [overrides]`.

If one of its processes exits, torchrun ends all of them. So each process is a *keeper*, which runs the rank as its
child and starts a new one when the coordinator asks for it. They communicate through torchrun's store.

The first process is the coordinator instead. It starts the keeper of its rank as a child.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cache
from typing import Any

from ..conf.clusters import ClusterConfig
from ..conf.errors import ConfigError
from ..conf.schema import HardwareConfig, ParallelConfig
from ..parallel.control import Endpoint
from ..parallel.openmp import choose_waiting
from ..runtime.pipeline import waits
from ..runtime.pipeline.launcher import Launcher
from .signals import end_process, how_ended
from .stderr_log import messages_on_stderr

_log = logging.getLogger(__name__)
_START = "gapless/start"  # plus rank and number: JSON arguments of that rank's process
_ENDED = "gapless/ended"  # number of processes that have exited; plus rank and number: how
_ROLE_ENV = "GAPLESS_ROLE"  # of a child: "keeper" or "rank"
_STORE_IS_OPEN = "TORCHELASTIC_USE_AGENT_STORE"  # torch's variable: the agent has opened the store, not the first rank
_TIMEOUT_S = 600.0
_LOOK_S = 0.05
_SELF = [sys.executable, "-m", "gapless.launch.torchrun"]
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class TorchrunLauncher(Launcher):
    """Has the keepers started by torchrun run the ranks. Keepers persist, so that each rank keeps its place."""

    can_replace = True

    def __init__(self) -> None:
        self._keeper: subprocess.Popen[bytes] | None = None  # of the first rank
        self._number: dict[int, int] = {}  # number of a rank's process, from 0
        self._num_ended = 0
        self._ended: dict[int, str] = {}
        self._address: dict[str, Any] = {}

    def check(self, parallel: ParallelConfig, hardware: HardwareConfig) -> None:
        """Raise `ConfigError` unless torchrun has started as many ranks as the grid has."""
        world = parallel.world_size
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ConfigError(
                f"parallel.launcher=torchrun: start with `torchrun --nproc-per-node {world} "
                "-m gapless.launch.torchrun COMMAND ...`"
            )
        if int(os.environ["WORLD_SIZE"]) != world:
            raise ConfigError(
                f"parallel.pp={parallel.pp} x parallel.tp={parallel.tp} is {world} ranks; "
                f"torchrun started {os.environ['WORLD_SIZE']}"
            )

    def start(
        self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig, cluster: ClusterConfig
    ) -> None:
        """See `Launcher.start`. Keepers read the ranks' arguments from the store; rank 0's keeper is started here."""
        self._address = {
            "device": hardware.device,
            "timeout_s": parallel.start_timeout_s,
            "stands_by": parallel.spares > 0,
        }
        for rank in range(parallel.world_size):
            self._tell(rank, endpoint)
        self._keeper = subprocess.Popen(_SELF, env=os.environ | {_ROLE_ENV: "keeper"})

    def _tell(self, rank: int, endpoint: Endpoint | None) -> None:
        """Have a rank's keeper start its next process; without an endpoint the keeper exits."""
        number = self._number[rank] = self._number.get(rank, -1) + 1
        address = None if endpoint is None else self._address | {"endpoint": asdict(endpoint)}
        _store().set(f"{_START}/{rank}/{number}", json.dumps(address))

    def replace(self, ranks: Collection[int], endpoint: Endpoint) -> None:
        """See `Launcher.replace`. Each keeper kills its process and starts the next."""
        for rank in ranks:
            self._ended.pop(rank, None)
            self._tell(rank, endpoint)

    def poll(self) -> dict[int, str]:
        """See `Launcher.poll`. Keepers report exits through torchrun's store."""
        num_ended = _store().add(_ENDED, 0)
        if num_ended != self._num_ended:
            self._num_ended = num_ended
            for rank, number in self._number.items():
                if _store().check([key := f"{_ENDED}/{rank}/{number}"]):
                    self._ended[rank] = _store().get(key).decode()
        code = None if self._keeper is None else self._keeper.poll()
        return self._ended if code is None else self._ended | {0: f"its keeper {how_ended(code)}"}

    def stop(self) -> None:
        """See `Launcher.stop`. Keepers end their ranks; rank 0's keeper is killed after `2 * waits.END_S` seconds."""
        with suppress(RuntimeError):  # torchrun's agent and its store are gone
            for rank in list(self._number):
                self._tell(rank, None)
        self._number.clear()
        if self._keeper is not None:
            end_process(self._keeper, 2 * waits.END_S)
        self._keeper = None


class _Keeper:
    """Runs the processes of a rank, one after the other, as the coordinator requests.

    A process imports everything and waits for its arguments on standard input. So the first one starts while the keeper
    connects to the store, and with `stands_by` the next one is ready before it is needed.
    """

    def __init__(self) -> None:
        self._waiting: subprocess.Popen[bytes] | None = self._new()
        self._running: subprocess.Popen[bytes] | None = None
        self._is_ending = False
        for number in (signal.SIGINT, signal.SIGTERM):  # torchrun sends them to all; the coordinator may drain first
            signal.signal(number, self._on_signal)

    @staticmethod
    def _new() -> subprocess.Popen[bytes]:
        return subprocess.Popen(_SELF, env=os.environ | {_ROLE_ENV: "rank"}, stdin=subprocess.PIPE)

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_ending = number == signal.SIGTERM or self._is_ending

    def run(self) -> None:
        """Return when the coordinator requests it, the rank has exited successfully, or torchrun ends all processes."""
        rank, number = os.environ["RANK"], 0
        try:
            while not (self._is_ending and self._running is None):
                if _store().check([key := f"{_START}/{rank}/{number}"]):
                    if (address := json.loads(_store().get(key))) is None:
                        break
                    self._start(address)
                    number += 1
                code = None if self._running is None else self._running.poll()
                if code == 0:
                    break
                if code is not None:
                    self._running = None
                    _store().set(f"{_ENDED}/{rank}/{number - 1}", f"its process {how_ended(code)}")
                    _store().add(_ENDED, 1)
                time.sleep(_LOOK_S)
        except RuntimeError:  # torchrun's agent and its store are gone
            pass
        self._end()

    def _start(self, address: dict[str, Any]) -> None:
        if self._running is not None:
            end_process(self._running)
        process = self._waiting or self._new()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has died, which is noticed next
            process.stdin.write(json.dumps(address).encode() + b"\n")
            process.stdin.close()
        self._running = process
        self._waiting = self._new() if address["stands_by"] else None

    def _end(self) -> None:
        if self._running is not None:
            end_process(self._running, waits.END_S)
        if self._waiting is not None:
            end_process(self._waiting)


@cache
def _store() -> Any:
    """Return the rendezvous store of torchrun's processes.

    If the first rank has to open it, it listens only at torchrun's master address. By default it would listen at all
    addresses.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=_TIMEOUT_S)
    if os.environ["RANK"] != "0" or os.environ.get(_STORE_IS_OPEN) == "True":
        return next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = socket.create_server((host, port), backlog=1024)
    world = int(os.environ["WORLD_SIZE"])
    os.environ[_STORE_IS_OPEN] = "True"  # for children of this process, such as a server's engine
    return dist.TCPStore(host, port, world, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def _serve() -> None:
    """Run as a rank, with arguments from the keeper."""
    from ..runtime.pipeline.rank import run_rank, warm_up

    warm_up()
    if not (line := sys.stdin.readline()):
        return
    address = json.loads(line)
    local = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local}" if address["device"] == "cuda" else "cpu"
    with messages_on_stderr():
        run_rank(Endpoint(**address["endpoint"]), int(os.environ["RANK"]), device, address["timeout_s"])


def _end_with_parent() -> None:
    """Have the kernel (Linux only) end this process when its parent dies, ultimately torchrun's agent.

    The driver gets SIGTERM, so that it can write a report; others get SIGKILL, which ends suspended ones too.
    """
    is_driver = os.environ.get("RANK") == "0" and _ROLE_ENV not in os.environ
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM if is_driver else signal.SIGKILL)


def main() -> int:
    """Run as the driver, a rank's keeper or a rank. Return the exit code."""
    _end_with_parent()
    choose_waiting()
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if os.environ.get(_ROLE_ENV) == "rank":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the coordinator decides
        _serve()
        return 0
    if "RANK" not in os.environ:
        with messages_on_stderr():
            _log.error("start with `torchrun --nproc-per-node N -m gapless.launch.torchrun COMMAND ...`")
        return 2
    if os.environ["RANK"] != "0" or _ROLE_ENV in os.environ:
        _Keeper().run()
        return 0
    return _drive()


def _drive() -> int:
    from .cli import main as cli

    store = _store()
    try:
        return cli([*sys.argv[1:], "parallel.launcher=torchrun"])
    finally:
        with suppress(RuntimeError):  # torchrun's agent and its store are gone
            for rank in range(1, int(os.environ["WORLD_SIZE"])):
                if not store.check([key := f"{_START}/{rank}/0"]):
                    store.set(key, "null")  # nothing was started: the other keepers exit


if __name__ == "__main__":
    from gapless.launch.torchrun import main as run  # the launcher's module, with which the store is shared

    sys.exit(run())
