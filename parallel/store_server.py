"""The coordinator's side of the store (`parallel/store.py`): a key-value store that ranks query."""

from __future__ import annotations

import queue
import selectors
import socket
import threading
from typing import Literal

import msgspec

from .frames import STORE, ConnectionLost, FrameSocket

Operation = Literal["set", "get", "add", "check", "delete"]


class Question(msgspec.Struct, frozen=True, array_like=True):
    """A rank's request to the store. Numbers are stored as decimal digits, as in torch's stores."""

    operation: Operation
    keys: list[str]
    value: bytes
    amount: int


_question = msgspec.msgpack.Decoder(Question)


class StoreServer:
    """Answers the ranks' requests in its own thread, since NCCL also sends them in the middle of a run."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._added: queue.SimpleQueue[FrameSocket | None] = queue.SimpleQueue()  # None: stop
        self._is_closed = False
        self._waking, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="store", daemon=True).start()

    def add(self, connection: FrameSocket) -> None:
        """Serve a rank on this connection from now on."""
        self._added.put(connection)
        self._waking.send(b"+")

    def close(self) -> None:
        """Close all connections, and stop the thread. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._added.put(None)
        self._waking.send(b"+")

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                connection: FrameSocket | None = key.data
                if connection is None:
                    self._woken.recv(1)
                    if (added := self._added.get()) is None:
                        self._end()
                        return
                    self._selector.register(added.socket, selectors.EVENT_READ, added)
                    continue
                try:
                    for _, payload in connection.receive_once():
                        answer = self._answer(_question.decode(payload))
                        connection.send(STORE, msgspec.msgpack.encode(answer))
                except (OSError, ConnectionLost):
                    self._selector.unregister(connection.socket)
                    connection.socket.close()

    def _end(self) -> None:
        for key in self._selector.get_map().values():
            if key.data is not None:
                key.data.socket.close()
        self._selector.close()
        self._waking.close()
        self._woken.close()

    def _answer(self, question: Question) -> bytes | int | bool | None:
        values, key = self._values, question.keys[0] if question.keys else ""
        match question.operation:
            case "set":
                values[key] = question.value
                return None
            case "get":
                return values.get(key)
            case "add":
                total = int(values.get(key, b"0")) + question.amount
                values[key] = str(total).encode()
                return total
            case "check":
                return all(key in values for key in question.keys)
            case "delete":
                return values.pop(key, None) is not None
