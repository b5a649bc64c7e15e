"""A local Ray instance of one driver: on loopback, in its own folder, and never outliving the driver."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MAX_FOLDER = 41  # bytes: Ray's socket paths in it are 66 longer, and Linux allows 107
_PREFIX = "gapless-ray-"
_WATCHED = {"gcs_server": "GCS", "raylet": "raylet"}


class _OurPath(list[str]):
    """The import path of workers, without the working directory that Ray adds, unless it is in `sys.path`."""

    def extend(self, folders: Iterable[str]) -> None:
        ours = {os.path.abspath(folder) for folder in sys.path}
        super().extend(folder for folder in folders if folder in ours)


def init_options() -> dict[str, Any]:
    """Return the options of every `ray.init`."""
    from ray.job_config import JobConfig

    job = JobConfig()
    job._py_driver_sys_path = _OurPath()  # else ranks would import a folder named torch in the working directory
    return {"log_to_driver": False, "logging_level": logging.ERROR, "job_config": job}


def hush() -> Callable[[], None]:
    """Stop Ray from printing its log when its raylet dies. Return a function that undoes this."""
    from ray._private import worker

    before = worker.print_to_stdstream
    worker.print_to_stdstream = lambda *args, **options: None
    return lambda: setattr(worker, "print_to_stdstream", before)


class LocalRay:
    """Starts Ray on creation. A watchdog process cleans up after `end`, or after the driver's death."""

    def __init__(self, num_cpus: int) -> None:
        import ray

        self._folder = _make_folder()
        self._watchdog = _start_watchdog(self._folder)
        try:
            with _loopback(), _signals_held():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=self._folder,
                    **init_options(),
                )
        except BaseException:
            self._sweep()
            ray.shutdown()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        from ray._private import worker

        self._unhush = hush()
        node: Any = worker._global_node
        self._processes: dict[str, subprocess.Popen[bytes]] = {
            name: node.all_processes[kind][0].process for kind, name in _WATCHED.items()
        }

    @property
    def fault(self) -> str | None:
        """The Ray process that has died, if any."""
        for name, process in self._processes.items():
            if (code := process.poll()) is not None:
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                return f"Ray's {name} (pid {process.pid}) on this machine has died: {how}"
        return None

    def end(self) -> None:
        """Stop Ray with its actors, and remove its folder.

        Its processes are killed first: a signal to the process group may have killed some, and Ray would wait a minute
        for a dead GCS.
        """
        import ray

        self._sweep()
        ray.shutdown()
        self._unhush()
        shutil.rmtree(self._folder, ignore_errors=True)  # recreated by shutdown

    def _sweep(self) -> None:
        """Have the watchdog kill the remaining processes, and wait for it."""
        if self._watchdog is not None:
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()
            self._watchdog.wait()


def _make_folder() -> str:
    """Create the folder in the temporary directory, or in /tmp if that path is too long for sockets."""
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(os.fsencode(parent)) + len(_PREFIX) + 9 > _MAX_FOLDER:
        parent = "/tmp"
    return tempfile.mkdtemp(prefix=_PREFIX, dir=parent)


def _start_watchdog(folder: str) -> subprocess.Popen[bytes] | None:
    """Start the watchdog in its own session, so that Ctrl-C does not reach it. It needs Linux's /proc."""
    if not sys.platform.startswith("linux"):
        return None
    script = Path(__file__).with_name("watchdog.py")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(script), folder, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def _loopback() -> Iterator[None]:
    """Make Ray listen on loopback only.

    With clusters enabled, Ray replaces 127.0.0.1 by this machine's address, and its processes listen on all addresses.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _signals_held() -> Iterator[None]:
    """Block the signals that end a run until Ray has started, for a few seconds at most, and keep our handlers.

    Ray's processes inherit the blocked signals. They survive a closed terminal and a signal to the process group, so
    that the driver can stop them in order. Ray would replace our SIGTERM handler.
    """
    from ray._private import utils

    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
