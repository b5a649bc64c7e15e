"""Cleans up after a driver's local Ray: kills its processes and removes its temporary folder.

Runs as a script alongside the driver: `python watchdog.py FOLDER DRIVER_PID`. It acts when the driver closes the pipe
to its standard input, or dies in any way. Every Ray process has a file in the folder open or the folder in its command
line.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.25
_KILL_S = 10.0  # then the folder is removed even if still in use


def wait_for_end(driver: int) -> None:
    """Wait until the driver closes the pipe or dies. A child of the driver may keep the pipe open for longer."""
    while os.getppid() == driver:
        if select.select([0], [], [], _POLL_S)[0] and not os.read(0, 1):
            return


def users_of(folder: str) -> Iterator[int]:
    """Yield the processes that have a file of the folder open or the folder in their command line."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has exited, or is another user's
            if folder.encode() in (process / "cmdline").read_bytes() or any(
                os.readlink(file).startswith(folder + "/") for file in (process / "fd").iterdir()
            ):
                yield int(process.name)


def main(folder: str, driver: int) -> None:
    """Wait for the end of the process `driver`, then kill all processes that use `folder`, and delete it."""
    wait_for_end(driver)
    deadline = time.monotonic() + _KILL_S
    while (left := set(users_of(folder)) - {driver, os.getpid()}) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
