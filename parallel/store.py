"""The store through which torch.distributed's processes find each other, hosted by the coordinator.

torch's own `TCPStore` accepts reads and writes from anyone who connects. Here each rank uses its own connection,
authenticated by the run's secret.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import msgspec
from torch.distributed import Store

from .frames import STORE, ConnectionLost, FrameSocket
from .store_server import Operation, Question

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between polls for an awaited key
_answer = msgspec.msgpack.Decoder(bytes | int | bool | None)


class ControlStore(Store):
    """A rank's side of the store: a `Store` for `init_process_group`. Any thread may call it.

    Args:
        connection: to the coordinator.
        timeout: limit on a wait for a key.
        prefix: prefix of every key. torch strips a `PrefixStore` for messages between NCCL watchdogs.

    Raises:
        ConnectionLost: the coordinator is gone, or `end` was called.
        TimeoutError: an awaited key was not set within `timeout`.
    """

    def __init__(self, connection: FrameSocket, timeout: timedelta, prefix: str = "") -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._patience = timeout
        self._connection = connection
        self._prefix = prefix
        self._lock = threading.Lock()
        self._is_ended = threading.Event()

    def end(self) -> None:
        """Make waits for keys fail now. Any thread may call it."""
        self._is_ended.set()

    def _ask(
        self, operation: Operation, keys: list[str], value: bytes = b"", amount: int = 0
    ) -> bytes | int | bool | None:
        keys = [self._prefix + key for key in keys]
        question = msgspec.msgpack.encode(Question(operation, keys, value, amount))
        with self._lock:
            self._connection.send(STORE, question)
            frames: list[tuple[bytes, bytes]] = []
            while not frames:
                frames = self._connection.receive_once()
        answer: bytes | int | bool | None = _answer.decode(frames[0][1])
        return answer

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key's value at the coordinator, for all ranks."""
        self._ask("set", [key], value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        """Wait until a rank has set the key; return its value. Raises the same errors as `wait`."""
        self.wait([key])
        value = self._ask("get", [key])
        assert isinstance(value, bytes), key
        return value

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a key's integer, initially 0; return the sum."""
        total = self._ask("add", [key], amount=amount)
        assert isinstance(total, int)
        return total

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have been set."""
        return bool(self._ask("check", keys))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._ask("delete", [key]))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have been set.

        Raises:
            TimeoutError: after `timeout`, or the store's own timeout.
            ConnectionLost: the pipeline is being restarted.
        """
        limit = self._patience if timeout is None else timeout
        deadline = time.monotonic() + limit.total_seconds()
        pause = _FIRST_PAUSE_S
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out after {limit.total_seconds():g} s of waiting for the other ranks")
            if self._is_ended.wait(pause):
                raise ConnectionLost("the pipeline is being restarted")
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def clone(self) -> ControlStore:
        """Return the store itself, since any thread may call it."""
        return self
