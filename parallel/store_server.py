"""The coordinator's side of the store (`parallel/store.py`): keys and values, asked for by the ranks."""

from __future__ import annotations

import selectors
import threading
from collections.abc import Iterable
from typing import Literal

import msgspec

from .frames import STORE, ConnectionLost, FrameSocket


class Question(msgspec.Struct, frozen=True, array_like=True):
    """What a rank asks of the store. A number is held as its decimal digits, as torch's stores do."""

    operation: Literal["set", "get", "add", "check", "delete"]
    keys: list[str]
    value: bytes
    amount: int


_question = msgspec.msgpack.Decoder(Question)


class StoreServer:
    """Answers the ranks' questions in a thread of its own, since NCCL asks in the middle of a run too."""

    def __init__(self, connections: Iterable[FrameSocket]) -> None:
        self._values: dict[str, bytes] = {}
        self._selector = selectors.DefaultSelector()
        for connection in connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        threading.Thread(target=self._serve, name="store", daemon=True).start()

    def _serve(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                connection: FrameSocket = key.data
                try:
                    for _, payload in connection.receive_once():
                        answer = self._answer(_question.decode(payload))
                        connection.send(STORE, msgspec.msgpack.encode(answer))
                except (OSError, ConnectionLost):
                    self._selector.unregister(connection.socket)
                    connection.socket.close()
        self._selector.close()

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
