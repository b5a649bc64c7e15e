"""Server side of a connection, with limits on request size, slow clients and the number of connections."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ...conf.serving import ServingConfig
from .errors import ApiError
from .every_answer import REQUEST_ID, request_id
from .exchange import Exchange
from .framing import framed
from .heads import MAX_HEAD, check_head, target, without_upgrade
from .lingering import LingeringTransport
from .routes import error_response

_UNKNOWN = re.compile(rb"^([!#$%&'*+.^_`|~\w-]{1,32}) \S+ HTTP/1\.[01]\r?$", re.MULTILINE | re.ASCII)
_MOST_REFUSED = 64  # connections beyond serve.max_connections that linger


def protocol_of(config: ServingConfig, note: Callable[[Exchange], None]) -> type[HttpToolsProtocol]:
    """Make the protocol class that uvicorn instantiates per connection.

    `note` is called for requests that are refused before the application sees them.
    """

    class Bounded(BoundedProtocol):
        serving = config
        noted = staticmethod(note)

    return Bounded


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with timeouts, which it lacks.

    A request must be complete within `serve.read_timeout_s` of its first byte, or of the connection's start. A client
    that reads no byte of its answer for `serve.write_timeout_s` is disconnected, and its requests are aborted. Heads
    that `check_head` rejects, and anything that is not HTTP, are refused; nothing after that is read from the
    connection.
    """

    serving: ServingConfig
    noted: Callable[[Exchange], None]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._reading: asyncio.TimerHandle | None = None  # runs until the request is complete
        self._writing: asyncio.TimerHandle | None = None  # runs while the client has not read all bytes
        self._unsent = 0  # bytes when that timer was set
        self._head_bytes: int | None = 0  # bytes of an incomplete head so far; None: it is complete
        self._is_refused = False
        self._refusal: ApiError | None = None  # of a head, while the parser hands it over
        self.parser = httptools.HttpRequestParser(self)  # strict, as by default

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection with 503 if there are too many, else wait for its first request."""
        super().connection_made(cast(asyncio.Transport, LingeringTransport(transport, self._must_linger)))
        # Any unsent byte calls `pause_writing`: sockets compare with > high, TLS with >= high.
        transport.set_write_buffer_limits(high=0 if transport.get_extra_info("sslcontext") is None else 1)
        if len(self.connections) > self.serving.max_connections:
            self._refuse(503, f"the server has serve.max_connections={self.serving.max_connections} connections open")
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel this connection's timers."""
        self._request_is_whole()
        self._all_is_sent()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received data. A head larger than `MAX_HEAD` bytes is refused with 431."""
        if self.transport.is_closing() or self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._reading is None and (self.cycle is None or self.cycle.response_complete):
            self._await_request()
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            unknown = _UNKNOWN.search(data) if isinstance(error, httptools.HttpParserInvalidMethodError) else None
            refusal = self._refusal or ApiError(400, f"invalid HTTP request: {error}")
            if unknown is not None:  # RFC 9110, 9.1
                refusal = ApiError(501, f"{unknown[1].decode()}: unknown method")
            self._refuse(refusal.status, refusal.message)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD:
            self._refuse(431, f"the request's head is larger than {MAX_HEAD >> 10} KiB")

    def _parse(self, data: memoryview) -> None:
        """Feed the parser. It stops after a head that offers an upgrade; the head is parsed again without the offer."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head = without_upgrade(self.parser, self.url, self.headers)
                data = data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)

    def on_message_begin(self) -> None:
        """Start the read timeout unless it is running."""
        super().on_message_begin()
        if self._reading is None:
            self._await_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers after a body are ignored."""
        if self._head_bytes is not None:
            super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        """Check the head, and stop counting its bytes: the body follows.

        Raises:
            ApiError: the head is invalid. The parser stops there.
        """
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return  # parsed again without the upgrade
        try:
            check_head(self.parser, self.url, self.headers)
            self.url = target(self.parser.get_method(), self.url)
        except ApiError as error:
            self._refusal = error
            raise
        self._head_bytes = None
        super().on_headers_complete()
        self.cycle.send = framed(self.cycle)  # type: ignore[method-assign,assignment]

    def on_message_complete(self) -> None:
        """Stop the read timeout, and count the bytes of the next head from 0."""
        if self._head_bytes is not None:  # its head is parsed again
            return
        self._request_is_whole()
        self._head_bytes = 0
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # the body came after its answer
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _await_request(self) -> None:
        self._reading = self.loop.call_later(self.serving.read_timeout_s, self._read_too_slowly)

    def _request_is_whole(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _read_too_slowly(self) -> None:
        if self.flow.read_paused:  # by us, while an earlier answer is in progress
            self._await_request()
        else:
            seconds = self.serving.read_timeout_s
            self._refuse(408, f"the request was not complete within serve.read_timeout_s={seconds:g}")

    def pause_writing(self) -> None:
        """Start the write timeout."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Stop the write timeout: the client has read everything."""
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
        """Answer the newest request with an error, if it has no answer, and close the connection.

        Answers to earlier requests come first; in that case a request with an incomplete head gets no answer.
        """
        if self.transport.is_closing() or self._is_refused:
            return
        self._is_refused = True
        self._request_is_whole()
        has_head = self._head_bytes is None  # then the newest cycle belongs to the refused request
        id = request_id(self.headers if has_head else ())
        headers = {REQUEST_ID.decode(): id, "connection": "close"}
        client = self.client[0] if self.client else ""
        self.noted(Exchange("-", "-", id, client, status=status, state={"error": text}))
        answer = error_response(ApiError(status, text, headers=headers), self.scope if has_head else {})
        if has_head and self.pipeline:
            self.pipeline[0] = self.cycle, cast(Any, answer)
        elif not has_head and self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
        else:
            if not has_head or not self.cycle.response_started:
                lines = b"".join(b"%s: %s\r\n" % header for header in answer.raw_headers)
                self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + bytes(answer.body))
            self.transport.close()

    def _must_linger(self) -> bool:
        """Return whether a request was answered that the client may still be sending."""
        is_early = self._reading is not None and self.cycle is not None and self.cycle.response_complete
        has_room = len(self.connections) <= self.serving.max_connections + _MOST_REFUSED
        return has_room and (self._is_refused or is_early)
