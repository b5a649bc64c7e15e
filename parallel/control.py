"""The control plane: one TCP connection a rank, frames of bytes, from the coordinator to all ranks and back.

A connection that ends is how the death of its other side is noticed, on any launcher and at once. Sockets bind to the
address that they are told; who connects must know the run's secret.
"""

from __future__ import annotations

import hmac
import os
import select
import selectors
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from ..conf.errors import ConfigError

_LENGTH = struct.Struct("!I")
_MAX_FRAME = 1 << 30
_JOIN, _PING, _PONG, _WELCOME, _DATA = b"j", b"p", b"q", b"w", b"d"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the coordinator listens, and the secret that a rank shows to join."""

    host: str
    port: int
    secret: str


class ConnectionLost(ConnectionError):  # noqa: N818
    """The other side of a control connection is gone."""


def boot_id() -> str:
    """Names this boot of this node: processes with the same one share `CLOCK_MONOTONIC`."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else socket.gethostname()


class _Frames:
    """Length-prefixed frames over a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._buffer = bytearray()

    def send(self, kind: bytes, payload: bytes) -> None:
        self.socket.sendall(_LENGTH.pack(len(payload) + 1) + kind + payload)

    def feed(self) -> list[tuple[bytes, bytes]]:
        """Read once what is there; the frames that are complete.

        Raises:
            ConnectionLost: end of stream.
        """
        try:
            data = self.socket.recv(1 << 18)
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("the connection was closed")
        self._buffer += data
        frames = []
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if not 1 <= length <= _MAX_FRAME:
                raise ConnectionLost(f"a frame of {length} bytes")
            end = at + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[at + _LENGTH.size : end])
            frames.append((body[:1], body[1:]))
            at = end
        del self._buffer[:at]
        return frames

    def read(self, timeout: float) -> list[tuple[bytes, bytes]]:
        """Block until at least one frame is complete."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.socket], [], [], left)[0]:
                raise TimeoutError("no answer on the control connection")
            if frames := self.feed():
                return frames


class ControlServer:
    """The coordinator's side: accepts `world_size` ranks, publishes to all, hears from each.

    Raises:
        ConfigError: `host` is not an address of this machine.
    """

    def __init__(self, host: str, world_size: int, secret: str) -> None:
        try:
            self._listener = socket.create_server((host, 0), backlog=world_size)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise ConfigError(
                f"parallel.host={host}: must be an address of this machine that the ranks can reach ({reason})"
            ) from error
        self._secret = secret.encode()
        self._world_size = world_size
        self._ranks: dict[int, _Frames] = {}
        self._selector = selectors.DefaultSelector()
        self.node: dict[int, str] = {}  # rank: its node's boot id
        self.clock_offset: dict[int, float] = {}  # rank: its monotonic clock minus ours, seconds

    @property
    def endpoint(self) -> Endpoint:
        host, port = self._listener.getsockname()[:2]
        return Endpoint(host, port, self._secret.decode())

    @property
    def connected(self) -> set[int]:
        return set(self._ranks)

    def accept(self, timeout: float) -> bool:
        """Wait for one rank to join; True once all have."""
        if len(self._ranks) < self._world_size and select.select([self._listener], [], [], timeout)[0]:
            sock, _ = self._listener.accept()
            try:
                self._welcome(sock)
            except (OSError, ValueError, TimeoutError):
                sock.close()
        return len(self._ranks) == self._world_size

    def _welcome(self, sock: socket.socket) -> None:
        frames = _Frames(sock)
        secret, rank_text, boot = frames.read(5.0)[0][1].decode().split("\n")
        rank = int(rank_text)
        if not hmac.compare_digest(secret.encode(), self._secret) or rank in self._ranks:
            raise ValueError("not of this run")
        self.node[rank] = boot
        self.clock_offset[rank] = 0.0 if boot == boot_id() else self._measure_offset(frames)
        frames.send(_WELCOME, b"")
        self._ranks[rank] = frames
        self._selector.register(sock, selectors.EVENT_READ, rank)

    @staticmethod
    def _measure_offset(frames: _Frames, rounds: int = 16) -> float:
        """The other clock minus ours, by the round trip that took the least (Cristian's algorithm)."""
        best, offset = float("inf"), 0.0
        for _ in range(rounds):
            start = time.monotonic()
            frames.send(_PING, b"")
            (theirs,) = struct.unpack("!d", frames.read(5.0)[0][1])
            end = time.monotonic()
            if end - start < best:
                best, offset = end - start, theirs - (start + end) / 2
        return offset

    def publish(self, payload: bytes) -> None:
        """Send one frame to every rank. A rank that is gone is reported by `poll`."""
        frame = _LENGTH.pack(len(payload) + 1) + _DATA + payload
        for frames in self._ranks.values():
            try:
                frames.socket.sendall(frame)
            except OSError:
                continue

    def poll(self, timeout: float) -> list[tuple[int, bytes | None]]:
        """(rank, frame) pairs that have come within `timeout` seconds; a frame of None says that the rank is gone."""
        got: list[tuple[int, bytes | None]] = []
        for key, _ in self._selector.select(timeout):
            rank = key.data
            try:
                got += [(rank, payload) for _, payload in self._ranks[rank].feed()]
            except ConnectionLost:
                self._forget(rank)
                got.append((rank, None))
        return got

    def _forget(self, rank: int) -> None:
        frames = self._ranks.pop(rank)
        self._selector.unregister(frames.socket)
        frames.socket.close()

    def close(self) -> None:
        for rank in list(self._ranks):
            self._forget(rank)
        self._selector.close()
        self._listener.close()


class ControlClient:
    """A rank's side.

    Raises:
        ConnectionLost: the coordinator is gone, or did not take this rank in.
    """

    def __init__(self, endpoint: Endpoint, rank: int, timeout: float) -> None:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout=timeout)
        sock.settimeout(None)
        self._frames = _Frames(sock)
        self._frames.send(_JOIN, f"{endpoint.secret}\n{rank}\n{boot_id()}".encode())
        self._early: list[bytes] = []
        self._await_welcome(timeout)

    def _await_welcome(self, timeout: float) -> None:
        welcome = False
        while not welcome:
            for kind, payload in self._frames.read(timeout):
                if kind == _PING:
                    self._frames.send(_PONG, struct.pack("!d", time.monotonic()))
                elif kind == _DATA:
                    self._early.append(payload)
                welcome = welcome or kind == _WELCOME

    @property
    def host(self) -> str:
        """This node's address as the coordinator sees it."""
        return str(self._frames.socket.getsockname()[0])

    def send(self, payload: bytes) -> None:
        """One frame to the coordinator; thread-safe only for one sender.

        Raises:
            ConnectionLost: the coordinator is gone.
        """
        try:
            self._frames.send(_DATA, payload)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> list[bytes]:
        """Block for the next frames.

        Raises:
            ConnectionLost: the coordinator is gone.
        """
        frames, self._early = self._early, []
        while not frames:
            frames = [payload for _, payload in self._frames.feed()]
        return frames

    def close(self) -> None:
        self._frames.socket.close()
