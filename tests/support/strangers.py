"""Connections to a control port that are no ranks: silent, slow, noisy, and one after the other."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

from gapless.parallel.control import Endpoint
from tests.support.tiers import HANGS_S

_NOISE = (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0\0\0\2dx", b"\0\0\1\0" + b"a" * 200)


class Strangers:
    """Holds `count` connections to `endpoint`: silent ones, ones that send a byte a second, and ones that send noise.

    One more thread connects again and again without a word.
    """

    def __init__(self, endpoint: Endpoint, count: int) -> None:
        self._address = (endpoint.host, endpoint.port)
        self._sockets = [socket.create_connection(self._address) for _ in range(count)]
        self._done = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._speak, self._knock)]

    def _speak(self) -> None:
        for number, sock in enumerate(self._sockets[::3]):
            with contextlib.suppress(OSError):
                sock.sendall(_NOISE[number % len(_NOISE)])
        while not self._done.wait(1.0):
            for sock in self._sockets[1::3]:
                with contextlib.suppress(OSError):
                    sock.sendall(b"\0")

    def _knock(self) -> None:
        while not self._done.wait(0.01):
            with contextlib.suppress(OSError):
                self._sockets.append(socket.create_connection(self._address, timeout=1.0))

    def __enter__(self) -> Strangers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(timeout=HANGS_S)
        for sock in self._sockets:
            sock.close()
