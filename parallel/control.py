"""The control plane: one TCP connection between the coordinator and each rank, which carries frames of bytes.

When one side dies, its connection closes, and the other side notices at once, under any launcher. The coordinator
listens on the address that it is given. A rank that connects must know the run's secret.
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

_LENGTH_PREFIX = struct.Struct("!I")
_MAX_FRAME_BYTES = 1 << 30
_RECEIVE_BYTES = 1 << 18
_JOIN, _PING, _PONG, _WELCOME, _DATA = b"j", b"p", b"q", b"w", b"d"  # kinds of frames


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address at which the coordinator listens, and the secret with which a rank joins."""

    host: str
    port: int
    secret: str


class ConnectionLost(ConnectionError):  # noqa: N818
    """Raised when the other side of a control connection is gone."""


def boot_id() -> str:
    """Return the id of this node's current boot. Processes with the same id share `CLOCK_MONOTONIC`."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else socket.gethostname()


class _FrameSocket:
    """Sends and receives length-prefixed frames over a blocking socket. A frame is one byte of kind and a payload."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._buffer = bytearray()

    def send(self, kind: bytes, payload: bytes) -> None:
        self.socket.sendall(_LENGTH_PREFIX.pack(len(payload) + 1) + kind + payload)

    def receive_once(self) -> list[tuple[bytes, bytes]]:
        """Receive once from the socket and return the (kind, payload) of each frame that is now complete.

        Raises:
            ConnectionLost: the connection ended, or sent a frame of an impossible length.
        """
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("the connection was closed")
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= _LENGTH_PREFIX.size:
            (length,) = _LENGTH_PREFIX.unpack_from(self._buffer, start)
            if not 1 <= length <= _MAX_FRAME_BYTES:
                raise ConnectionLost(f"a frame of {length} bytes")
            end = start + _LENGTH_PREFIX.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[start + _LENGTH_PREFIX.size : end])
            frames.append((body[:1], body[1:]))
            start = end
        del self._buffer[:start]
        return frames

    def receive(self, timeout: float) -> list[tuple[bytes, bytes]]:
        """Block until at least one frame is complete; return the complete ones.

        Raises:
            ConnectionLost: the connection ended.
            TimeoutError: no frame was complete within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self.socket], [], [], remaining)[0]:
                raise TimeoutError("no answer on the control connection")
            if frames := self.receive_once():
                return frames


class ControlServer:
    """The coordinator's side: accepts `world_size` ranks, sends each frame to all of them, receives from each.

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
        self._ranks: dict[int, _FrameSocket] = {}
        self._selector = selectors.DefaultSelector()
        self.node: dict[int, str] = {}  # by rank: the boot id of its node
        self.clock_offset: dict[int, float] = {}  # by rank: its monotonic clock minus ours, in seconds

    @property
    def endpoint(self) -> Endpoint:
        host, port = self._listener.getsockname()[:2]
        return Endpoint(host, port, self._secret.decode())

    @property
    def connected(self) -> set[int]:
        return set(self._ranks)

    def accept(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for one rank to join. Returns whether all ranks have joined."""
        if len(self._ranks) < self._world_size and select.select([self._listener], [], [], timeout)[0]:
            sock, _ = self._listener.accept()
            try:
                self._welcome(sock)
            except (OSError, ValueError, TimeoutError):
                sock.close()
        return len(self._ranks) == self._world_size

    def _welcome(self, sock: socket.socket) -> None:
        connection = _FrameSocket(sock)
        secret, rank_text, boot = connection.receive(5.0)[0][1].decode().split("\n")
        rank = int(rank_text)
        if not hmac.compare_digest(secret.encode(), self._secret) or rank in self._ranks:
            raise ValueError("not of this run")
        self.node[rank] = boot
        self.clock_offset[rank] = 0.0 if boot == boot_id() else self._measure_clock_offset(connection)
        connection.send(_WELCOME, b"")
        self._ranks[rank] = connection
        self._selector.register(sock, selectors.EVENT_READ, rank)

    @staticmethod
    def _measure_clock_offset(connection: _FrameSocket, num_rounds: int = 16) -> float:
        """Return the rank's clock minus ours, in seconds, from the fastest round trip (Cristian's algorithm)."""
        fastest, offset = float("inf"), 0.0
        for _ in range(num_rounds):
            start = time.monotonic()
            connection.send(_PING, b"")
            (theirs,) = struct.unpack("!d", connection.receive(5.0)[0][1])
            end = time.monotonic()
            if end - start < fastest:
                fastest, offset = end - start, theirs - (start + end) / 2
        return offset

    def publish(self, payload: bytes) -> None:
        """Send one frame to every rank. Ranks that are gone are skipped; `poll` reports them."""
        frame = _LENGTH_PREFIX.pack(len(payload) + 1) + _DATA + payload
        for connection in self._ranks.values():
            try:
                connection.socket.sendall(frame)
            except OSError:
                continue

    def poll(self, timeout: float) -> list[tuple[int, bytes | None]]:
        """Return the (rank, payload) pairs received within `timeout` seconds. A payload of None: the rank is gone."""
        received: list[tuple[int, bytes | None]] = []
        for key, _ in self._selector.select(timeout):
            rank = key.data
            try:
                received += [(rank, payload) for _, payload in self._ranks[rank].receive_once()]
            except ConnectionLost:
                self._disconnect(rank)
                received.append((rank, None))
        return received

    def _disconnect(self, rank: int) -> None:
        connection = self._ranks.pop(rank)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def close(self) -> None:
        for rank in list(self._ranks):
            self._disconnect(rank)
        self._selector.close()
        self._listener.close()


class ControlClient:
    """A rank's side of the control connection: joins on creation, then exchanges frames with the coordinator.

    Raises:
        ConnectionLost: the coordinator is gone, or refused this rank.
    """

    def __init__(self, endpoint: Endpoint, rank: int, timeout: float) -> None:
        sock = socket.create_connection((endpoint.host, endpoint.port), timeout=timeout)
        sock.settimeout(None)
        self._connection = _FrameSocket(sock)
        self._connection.send(_JOIN, f"{endpoint.secret}\n{rank}\n{boot_id()}".encode())
        self._unread: list[bytes] = []  # payloads that came together with the welcome
        self._await_welcome(timeout)

    def _await_welcome(self, timeout: float) -> None:
        is_welcome = False
        while not is_welcome:
            for kind, payload in self._connection.receive(timeout):
                if kind == _PING:
                    self._connection.send(_PONG, struct.pack("!d", time.monotonic()))
                elif kind == _DATA:
                    self._unread.append(payload)
                is_welcome = is_welcome or kind == _WELCOME

    @property
    def host(self) -> str:
        """The address of this node on the interface that reaches the coordinator."""
        return str(self._connection.socket.getsockname()[0])

    def send(self, payload: bytes) -> None:
        """Send one frame to the coordinator. Only one thread may send.

        Raises:
            ConnectionLost: the coordinator is gone.
        """
        try:
            self._connection.send(_DATA, payload)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> list[bytes]:
        """Block until at least one frame is complete; return the payloads of the complete ones.

        Raises:
            ConnectionLost: the coordinator is gone.
        """
        payloads, self._unread = self._unread, []
        while not payloads:
            payloads = [payload for _, payload in self._connection.receive_once()]
        return payloads

    def close(self) -> None:
        self._connection.socket.close()
