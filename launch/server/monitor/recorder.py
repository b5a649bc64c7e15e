"""`POST /record`: records a window of the run as a run folder, like `gapless bench`."""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ....parallel.frames import DATA, pack
from ....runtime.analysis.run_folder.read import read_run_folder
from ....runtime.serving.messages import Recorded
from ..engine_client import TAKES_REQUESTS, EngineClient
from ..errors import ApiError
from .live_window import WindowWords

_CHECK_S = 0.25


class Recorder:
    """Records one window at a time.

    Args:
        client: the engine.
        run_dir: the server's run folder; each recording is a folder in it.
        config: the run's config as a plain mapping, for the summary.
        versions: package versions by name.
    """

    def __init__(
        self, client: EngineClient, run_dir: Path, config: Mapping[str, Any], versions: Mapping[str, str]
    ) -> None:
        self._client = client
        self._run_dir = run_dir
        secret = {"serve": {**config["serve"], "api_keys": []}}
        self._head = msgspec.json.encode({"config": {**config, **secret}, "versions": versions})
        self._is_recording = False

    async def record(self, seconds: float) -> dict[str, Any]:
        """Record for `seconds` seconds.

        Returns:
            The folder, the names of its files and the summary in words, once they are written.

        Raises:
            ApiError: a recording is in progress, the engine is not ready or failed, or the folder cannot be written.
        """
        if self._is_recording:
            raise ApiError(409, "a recording is in progress; try again when it has finished")
        if self._client.state not in TAKES_REQUESTS:
            raise ApiError(503, self._client.reason)
        self._is_recording = True
        folder = self._new_folder()
        try:
            folder.mkdir(parents=True)
            parts = folder / "parts"
            with parts.open("wb") as file:
                file.write(pack(DATA, self._head))
                await self._take(lambda payload: file.write(pack(DATA, payload)), seconds)
            said = await _write(parts, folder)
            summary = read_run_folder(folder).summary
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ApiError(500, f"{folder} cannot be written ({error.strerror})") from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            self._is_recording = False
        names = sorted(file.name for file in folder.iterdir())
        keys = ("duration", "completed", "micro_batches", "output_throughput", "bubble_fraction")
        return {
            "folder": str(folder),
            "files": names,
            "seconds": seconds,
            **msgspec.structs.asdict(said),
            **{key: summary[key] for key in keys},
        }

    def _new_folder(self) -> Path:
        folders = (self._run_dir / f"recording_{number}" for number in itertools.count(1))
        return next(folder for folder in folders if not folder.exists())

    async def _take(self, write: Callable[[bytes], object], seconds: float) -> None:
        """Let the engine record, and pass each part to `write`; the seconds count from the first part."""
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(message: Recorded, payload: bytes) -> None:
            if not began.done():
                began.set_result(None)
            try:
                if not ended.done():
                    write(message.part)
                    if message.is_last:
                        ended.set_result(None)
            except OSError as error:
                ended.set_exception(error)

        client = self._client
        client.listen(Recorded, take)
        client.record(True)
        try:
            await self._wait(began)
            await self._wait(ended, seconds)
            client.record(False)
            await self._wait(ended)
            await ended
        finally:
            client.record(False)
            ended.cancel()  # so that nothing more is written

    async def _wait(self, future: asyncio.Future[None], seconds: float = math.inf) -> None:
        """Wait for the future, at most `seconds` seconds, while the engine is alive."""
        now = asyncio.get_running_loop().time
        until = now() + seconds
        while not future.done() and (left := until - now()) > 0:
            await asyncio.wait({future}, timeout=min(left, _CHECK_S))
            self._check()

    def _check(self) -> None:
        if self._client.state in ("failed", "closed"):
            raise ApiError(503, self._client.reason)


async def _write(parts: Path, folder: Path) -> WindowWords:
    """Write the run folder in a separate process; return the summary in words.

    Raises:
        ApiError: it failed.
    """
    module = "gapless.launch.server.monitor.write_recording"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        str(parts),
        str(folder),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, errors = await process.communicate()
    except BaseException:
        process.kill()
        raise
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise ApiError(500, f"the recording cannot be written: {lines[-1] if lines else 'its process died'}")
    return msgspec.json.decode(said, type=WindowWords)
