"""The admission of ranks at the control port: a connecting rank must send the run's secret.

One loop serves all handshakes concurrently, so that silent or slow strangers do not block any rank.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from .frames import JOIN, PING, REFUSED, STORE, WELCOME, FrameSocket

_MAX_FRAME_BYTES = 512  # before the secret has been sent
_MAX_STRANGERS = 128
_SECRET_TIMEOUT_S = 5.0
_CLOCK_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Member:
    """An admitted rank's connection: its control or its store connection.

    `clock_offset` is the rank's monotonic clock minus ours, in seconds, measured on its control connection.
    """

    rank: int
    is_store: bool
    boot: str
    clock_offset: float
    connection: FrameSocket


_Handshake = Generator[None, tuple[bytes, bytes], Member]


@dataclass(slots=True, eq=False)
class _Candidate:
    connection: FrameSocket
    deadline: float
    handshake: _Handshake = field(init=False)


def boot_id() -> str:
    """Return the id of this node's current boot. Processes with the same id share `CLOCK_MONOTONIC`."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else socket.gethostname()


class Admission:
    """Admits both connections of each of `ranks` once, regardless of other connections.

    At most 128 connections may wait without having sent the secret, for 5 seconds each. Beyond that the oldest is
    closed. A rank whose connection is closed this way retries.
    """

    def __init__(self, host: str, ranks: Iterable[int], secret: str) -> None:
        self._listener = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
        self._listener.setblocking(False)
        self._secret = secret.encode()
        self._awaited = set(product((JOIN, STORE), ranks))
        self._strangers: dict[_Candidate, None] = {}  # the oldest first
        self._members: set[_Candidate] = set()  # have sent the secret; their clocks are being measured
        self._admitted: deque[Member] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def address(self) -> tuple[str, int]:
        """The host and port to which ranks connect."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have been admitted with both connections."""
        return not (self._awaited or self._members or self._admitted)

    def next(self, timeout: float) -> Member | None:
        """Wait for the next admitted connection. None: there was none within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._admitted:
            now = time.monotonic()
            for late in [stranger for stranger in self._strangers if stranger.deadline < now]:
                self._close(late)
            for key, _ in self._selector.select(max(0.0, min(deadline - now, _SECRET_TIMEOUT_S))):
                if key.data is None:
                    self._accept()
                elif key.data in self._strangers or key.data in self._members:  # not closed since
                    self._read(key.data)
            if now > deadline:
                break
        return self._admitted.popleft() if self._admitted else None

    def _accept(self) -> None:
        for _ in range(_MAX_STRANGERS):
            try:
                sock, _ = self._listener.accept()
            except OSError:  # no more connections, or the peer has already left
                return
            sock.setblocking(False)
            candidate = _Candidate(FrameSocket(sock, _MAX_FRAME_BYTES), time.monotonic() + _SECRET_TIMEOUT_S)
            candidate.handshake = self._handshake(candidate)
            next(candidate.handshake)
            self._selector.register(sock, selectors.EVENT_READ, candidate)
            self._strangers[candidate] = None
            if len(self._strangers) > _MAX_STRANGERS:
                self._close(next(iter(self._strangers)))
            self._read(candidate)

    def _read(self, candidate: _Candidate) -> None:
        try:
            for frame in candidate.connection.receive_once():
                candidate.handshake.send(frame)
        except StopIteration as end:
            self._selector.unregister(candidate.connection.socket)
            self._members.discard(candidate)
            self._admitted.append(end.value)
        except (OSError, ValueError):
            self._close(candidate)

    def _handshake(self, candidate: _Candidate) -> _Handshake:
        """Run one handshake, a generator that is sent the frames of its connection.

        Raises:
            ValueError: the candidate is not an awaited rank.
        """
        connection = candidate.connection
        kind, payload = yield
        secret, rank_text, boot_text = payload.split(b"\n")
        rank, boot = int(rank_text), boot_text.decode()
        if not hmac.compare_digest(secret, self._secret) or (kind, rank) not in self._awaited:
            connection.send(REFUSED, b"")
            raise ValueError("not of this run")
        del self._strangers[candidate]
        self._members.add(candidate)
        self._awaited.remove((kind, rank))
        try:
            offset = 0.0
            if kind == JOIN and boot != boot_id():
                offset = yield from self._measure_clock_offset(connection)
            connection.trust()
            connection.send(WELCOME, b"")
        except BaseException:
            self._awaited.add((kind, rank))
            raise
        return Member(rank, kind == STORE, boot, offset, connection)

    @staticmethod
    def _measure_clock_offset(connection: FrameSocket) -> Generator[None, tuple[bytes, bytes], float]:
        """Return the rank's clock minus ours, in seconds, from the fastest round trip (Cristian's algorithm)."""
        fastest, offset = float("inf"), 0.0
        for _ in range(_CLOCK_ROUNDS):
            start = time.monotonic()
            connection.send(PING, b"")
            _, payload = yield
            end = time.monotonic()
            if end - start < fastest:
                (theirs,) = struct.unpack("!d", payload)
                fastest, offset = end - start, theirs - (start + end) / 2
        return offset

    def _close(self, candidate: _Candidate) -> None:
        self._strangers.pop(candidate, None)
        self._members.discard(candidate)
        self._selector.unregister(candidate.connection.socket)
        candidate.handshake.close()
        candidate.connection.socket.close()

    def close(self) -> None:
        """Close the port, and all connections not yet handed out by `next`. A second call does nothing."""
        for candidate in [*self._strangers, *self._members]:
            self._close(candidate)
        for member in self._admitted:
            member.connection.socket.close()
        self._admitted.clear()
        self._selector.close()
        self._listener.close()
