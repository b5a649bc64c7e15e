"""The server's side of a connection, with bounds on clients that send, read or connect more than they should."""

from __future__ import annotations

import asyncio
import resource
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ...conf.errors import ConfigError
from ...conf.serving import ServingConfig
from .errors import ApiError
from .lingering import LingeringTransport

_MAX_HEAD = 64 << 10  # bytes of a request's first line and headers
_OTHER_FILES = 128  # that the front has open beside its connections
_MOST_REFUSED = 64  # connections beyond serve.max_connections that linger


def protocol_of(config: ServingConfig) -> type[HttpToolsProtocol]:
    """Make the protocol class of which uvicorn makes an instance for each connection."""

    class Bounded(BoundedProtocol):
        serving = config

    return Bounded


def allow_files(config: ServingConfig) -> None:
    """Let this process open as many files as `serve.max_connections` takes.

    Raises:
        ConfigError: the system does not let it.
    """
    needed = config.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ConfigError(
                f"serve.max_connections={config.max_connections}: a process may open {hard} files here (ulimit -Hn); "
                f"must be {max(1, hard - _OTHER_FILES)} at most"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which by itself waits for a client without end.

    A request must have arrived whole within `serve.read_timeout_s` of its first byte, or of the connection's start. A
    client that takes no byte of its answer for `serve.write_timeout_s` loses the connection. The application then ends
    its requests, as where a client has gone.
    """

    serving: ServingConfig

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._reading: asyncio.TimerHandle | None = None  # runs until the request is whole
        self._writing: asyncio.TimerHandle | None = None  # runs while there are bytes that the client has not taken
        self._unsent = 0  # bytes, when that timer was set
        self._head_bytes: int | None = 0  # bytes that came of an incomplete head; None: it is complete
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection with 503 if there are too many, else wait for its first request."""
        super().connection_made(cast(asyncio.Transport, LingeringTransport(transport, self._must_linger)))
        transport.set_write_buffer_limits(high=0)  # a single byte that waits calls `pause_writing`
        if len(self.connections) > self.serving.max_connections:
            self._refuse(503, f"the server has serve.max_connections={self.serving.max_connections} connections open")
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the limits of time that run for this connection."""
        self._request_is_whole()
        self._all_is_sent()
        super().connection_lost(exc)

    # What comes from the client.

    def data_received(self, data: bytes) -> None:
        """Parse what has come. A head larger than `_MAX_HEAD` bytes is refused with 431."""
        if self.transport.is_closing():
            return
        if self._reading is None and (self.cycle is None or self.cycle.response_complete):
            self._await_request()
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > _MAX_HEAD:
            self._refuse(431, f"the request's head is larger than {_MAX_HEAD >> 10} KiB")

    def on_message_begin(self) -> None:
        """Limit the time in which the request must come, if it is not limited yet."""
        super().on_message_begin()
        if self._reading is None:
            self._await_request()

    def on_headers_complete(self) -> None:
        """Stop counting the bytes of the head: what comes next is body."""
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the limit on the time of the request, and count the bytes of the next head from 0."""
        self._request_is_whole()
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the form in which this server answers all errors."""
        self._refuse(400, msg)

    def _await_request(self) -> None:
        self._reading = self.loop.call_later(self.serving.read_timeout_s, self._read_too_slowly)

    def _request_is_whole(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _read_too_slowly(self) -> None:
        if self.flow.read_paused:  # by us, while an answer before this one is under way
            self._await_request()
        else:
            seconds = self.serving.read_timeout_s
            self._refuse(408, f"the request was not complete within serve.read_timeout_s={seconds:g}")

    # What goes to the client.

    def pause_writing(self) -> None:
        """Limit the time for which the client may leave its answer unread."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """End the limit on the time of the reader: it has taken all that was sent."""
        self._all_is_sent()
        super().resume_writing()

    def _await_reader(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self.serving.write_timeout_s, self._taken_too_slowly)

    def _all_is_sent(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _taken_too_slowly(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:
            self._await_reader()
        else:
            self.transport.abort()

    def _refuse(self, status: int, text: str) -> None:
        """Answer with an error where no answer has begun, and close the connection."""
        if self.transport.is_closing():
            return
        is_answering = bool(self.pipeline) or (self.cycle is not None and self.cycle.response_started)
        if not is_answering or self.cycle.response_complete:
            self._is_refused = True
            body = msgspec.json.encode(ApiError(status, text).body)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _must_linger(self) -> bool:
        """Return whether the client has an answer to a request that it may still be sending."""
        is_early = self._reading is not None and self.cycle is not None and self.cycle.response_complete
        has_room = len(self.connections) <= self.serving.max_connections + _MOST_REFUSED
        return has_room and (self._is_refused or is_early)
