"""Length-prefixed frames over a socket: a length, a one-byte kind, a payload."""

from __future__ import annotations

import select
import socket
import struct
import time

JOIN, PING, PONG, WELCOME, REFUSED, DATA = b"j", b"p", b"q", b"w", b"r", b"d"  # kinds of frames
STORE = b"s"  # joins and requests on the store connection

_LENGTH_PREFIX = struct.Struct("!I")
_MAX_FRAME_BYTES = 1 << 30
_RECEIVE_BYTES = 1 << 18


class ConnectionLost(ConnectionError):  # noqa: N818
    """Raised when the peer of a control connection is gone."""


def pack(kind: bytes, payload: bytes) -> bytes:
    """Return a frame: the length of what follows, one byte of `kind`, then `payload`."""
    return _LENGTH_PREFIX.pack(len(payload) + 1) + kind + payload


class FrameBuffer:
    """Assembles frames from received data."""

    def __init__(self, max_frame_bytes: int = _MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Add received data; return the (kind, payload) of each frame that is now complete.

        Raises:
            ConnectionLost: a frame has an impossible length.
        """
        self._buffer += data
        frames = []
        start = 0
        while len(self._buffer) - start >= _LENGTH_PREFIX.size:
            (length,) = _LENGTH_PREFIX.unpack_from(self._buffer, start)
            if not 1 <= length <= self.max_frame_bytes:
                raise ConnectionLost(f"a frame of {length} bytes")
            end = start + _LENGTH_PREFIX.size + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[start + _LENGTH_PREFIX.size : end])
            frames.append((body[:1], body[1:]))
            start = end
        del self._buffer[:start]
        return frames


class FrameSocket:
    """Sends and receives frames over a socket. `max_frame_bytes` limits the size of received frames."""

    def __init__(self, sock: socket.socket, max_frame_bytes: int = _MAX_FRAME_BYTES) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._frames = FrameBuffer(max_frame_bytes)

    def trust(self) -> None:
        """Accept frames of up to the default limit from now on, and make the socket blocking."""
        self._frames.max_frame_bytes = _MAX_FRAME_BYTES
        self.socket.setblocking(True)

    def send(self, kind: bytes, payload: bytes) -> None:
        """Send one frame; blocks while the socket's buffer is full."""
        self.socket.sendall(pack(kind, payload))

    def receive_once(self) -> list[tuple[bytes, bytes]]:
        """Receive once from the socket and return the (kind, payload) of each frame that is now complete.

        Raises:
            ConnectionLost: the connection was closed, or a frame has an impossible length.
        """
        try:
            data = self.socket.recv(min(_RECEIVE_BYTES, self._frames.max_frame_bytes))
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("the connection was closed")
        return self._frames.feed(data)

    def receive(self, timeout: float) -> list[tuple[bytes, bytes]]:
        """Block until at least one frame is complete; return the complete ones.

        Raises:
            ConnectionLost: the connection was closed.
            TimeoutError: no frame was complete within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self.socket], [], [], remaining)[0]:
                raise TimeoutError("no answer on the control connection")
            if frames := self.receive_once():
                return frames
