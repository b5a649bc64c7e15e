"""A gzip file that another thread compresses and writes while the caller makes what comes next."""

from __future__ import annotations

import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

_COMPRESSION_LEVEL = 2  # higher levels take twice as long, and files hardly shrink
_GZIP_FORMAT = 16 + zlib.MAX_WBITS


class GzipStream:
    """A gzip file to write to in a `with` statement.

    `write` returns before the data is compressed; the next `write`, or the end of the block, waits for it.

    Raises:
        OSError: the file can't be written. Opening, `write` and the end of the block raise it; an error of one `write`
            may come from the next.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._deflate = zlib.compressobj(_COMPRESSION_LEVEL, zlib.DEFLATED, _GZIP_FORMAT)
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
