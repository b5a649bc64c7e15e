"""A gzip file that is compressed on another thread while the next of it is made."""

from __future__ import annotations

import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

_LEVEL = 2  # beyond it files hardly shrink, and take twice as long
_GZIP = 16 + zlib.MAX_WBITS


class GzipStream:
    """To be entered, written to, and left; what one write is given may still be under way at the next.

    Raises:
        OSError: from any of them, where the file can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gzip")
        self._pending: Future[None] | None = None

    def __enter__(self) -> GzipStream:
        return self

    def write(self, data: bytes) -> None:
        self._wait()
        self._pending = self._thread.submit(self._compress, data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._wait()
            self._file.write(self._deflate.flush())
        finally:
            self._thread.shutdown()
            self._file.close()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _compress(self, data: bytes) -> None:
        self._file.write(self._deflate.compress(data))
