"""Sends faulty HTTP and checks that no request gets two answers: `python -m benchmarks.http_faults`.

A grammar generates requests with conflicting, wrong or missing lengths, chunked coding, upgrades, expectations, old
versions, folded lines and bare line feeds; a body contains a request of its own. Each request has its own connection,
often followed by a valid request, and is sent in pieces. A second parser, h11, counts the requests in the sent bytes.
Prints the first answers by fault and status. Fails if a connection gets more answers than requests or a server error
(5xx, except 501 for unknown methods), or is not closed within `MOST_SECONDS`. Overrides of the server follow the
options.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import h11

from .support.harness import Benchmark, say
from .support.server import gapless_server

MOST_SECONDS = 10.0
LIMITS = ("serve.read_timeout_s=1", "serve.keep_alive_s=0.5")  # close connections soon
_INNER = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
_GOOD = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
_BODIES = (_INNER, b'{"prompt": "x", "max_tokens": 1}', b'{"prompt": "' + _INNER * 3, b"", b"0\r\n\r\n" + _INNER)
_UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
# fmt: off
_HEADS: dict[str, tuple[bytes, ...]] = {  # by fault, headers; %d is the length of the body
    "right": (b"Content-Length: %d\r\n", b"Transfer-Encoding: chunked\r\n"),
    "two lengths": (
        b"Content-Length: %d\r\nContent-Length: %d\r\n", b"Content-Length: %d\r\nContent-Length: 0\r\n",
        b"Content-Length: 0\r\nContent-Length: %d\r\n", b"Content-Length: %d, %d\r\n",
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n",
    ),
    "wrong length": (
        b"Content-Length: 0\r\n", b"Content-Length: 7\r\n", b"Content-Length: 9999\r\n", b"Content-Length: -%d\r\n",
        b"Content-Length: +%d\r\n", b"Content-Length: 0x%d\r\n", b"Content-Length: %d 0\r\n", b"Content-Length:\r\n",
        b"Content-Length: 99999999999999999999\r\n", b"Content-Length: %d;\r\n", b"Content-Length: \xb2\r\n",
    ),
    "no length": (b"", b"Connection: close\r\n", b"Connection: keep-alive\r\n"),
    "coding": (
        b"Transfer-Encoding: chunked, identity\r\n", b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: CHUNKED\r\n", b"Transfer-Encoding:\tchunked\r\n", b"Transfer-Encoding: \"chunked\"\r\n",
        b"Transfer-Encoding: chunked;q=1\r\n", b"Transfer-Encoding\0: chunked\r\n", b"Transfer_Encoding: chunked\r\n",
    ),
    "line": (
        b"Content-Length : %d\r\n", b" Content-Length: %d\r\n", b"X: a\r\n Content-Length: %d\r\n",
        b"Content-Length: %d\n", b"X: a\nContent-Length: %d\r\n", b"X: a\rContent-Length: %d\r\n",
        b"Transfer-Encoding : chunked\r\n", b"Transfer-Encoding:\r\n chunked\r\n", b"Content-Length\r\n",
        b"X: a\0b\r\nContent-Length: %d\r\n", b": a\r\nContent-Length: %d\r\n", b"\r\nContent-Length: %d\r\n",
    ),
    "upgrade": (
        _UPGRADE + b"Content-Length: %d\r\n", _UPGRADE + b"Transfer-Encoding: chunked\r\n", _UPGRADE,
        _UPGRADE + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n",
        b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nContent-Length: %d\r\n",
    ),
    "expect": (
        b"Expect: 100-continue\r\nContent-Length: %d\r\n", b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n",
        b"Expect: x\r\nContent-Length: %d\r\n", b"Expect: 100-continue\r\nContent-Length: 9999\r\n",
    ),
    "host": (b"Host: b\r\nContent-Length: %d\r\n",),
    "large": (b"X: " + b"a" * 70_000 + b"\r\nContent-Length: %d\r\n", b"X: a\r\n" * 20_000 + b"Content-Length: %d\r\n"),
}
_FIRST = (
    *(b"POST /v1/completions HTTP/1.1",) * 8, b"POST /nothing HTTP/1.1", b"GET /health HTTP/1.1",
    b"PUT /version HTTP/1.1",
    b"POST /v1/completions HTTP/1.0", b"GET /version HTTP/1.0", b"OPTIONS * HTTP/1.1", b"DELETE /version HTTP/1.1",
    b"POST http://b/v1/completions HTTP/1.1", b"CONNECT a:80 HTTP/1.1", b"POST /v1/completions HTTP/2.0",
    b"POST /v1/completions", b"post /v1/completions HTTP/1.1",
    b"POST /\xff HTTP/1.1",
)
_SIZES = (*(b"%x",) * 4, b"%X;a=b", b"0%x", b"%x ", b" %x", b"0x%x", b"-%x", b"%xg", b"fffffffffffffffff%x")
_ENDS = (b"\r\n", b"\r\n", b"\r\n", b"\r\n", b"\n", b"", b"\r", b"\r\n\r\n")
_LASTS = (
    b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nX-Request-Id: t\r\nContent-Length: 5\r\n\r\n", b"0\r\n", b"",
    b"0\n\n", b"00\r\n\r\n",
    b"0;a\r\n\r\n", b"0\r\nX : 1\r\n\r\n",
)
# fmt: on


@dataclass(frozen=True)
class Faulty:
    """A request and the bytes after it, in the pieces in which they are sent."""

    kind: str
    pieces: tuple[bytes, ...]

    @property
    def sent(self) -> bytes:
        return b"".join(self.pieces)

    def targets(self) -> list[bytes]:
        """Return the targets of the requests that h11 parses; b"" for an invalid or truncated head."""
        found = []
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        connection.receive_data(self.sent)
        is_head = True
        try:
            while not isinstance(event := connection.next_event(), type(h11.NEED_DATA)):
                if isinstance(event, h11.Request):
                    found.append(event.target)
                    is_head = False
                elif isinstance(event, h11.EndOfMessage):
                    connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                    connection.send(h11.EndOfMessage())
                    connection.start_next_cycle()
                    is_head = bool(connection.trailing_data[0])
        except h11.ProtocolError:
            pass
        return [*found, b""] if is_head else found


def faulty(seed: int) -> Iterator[Faulty]:
    """Yield requests indefinitely; deterministic by seed."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(tuple(_HEADS))
        body = rng.choice(_BODIES)
        head = rng.choice(_HEADS[kind]).replace(b"%d", b"%d" % len(body))
        if b"hunked" in head and rng.random() < 0.9:
            body = _chunked(body, rng)
        end = b"\r\n" if rng.random() < 0.95 else rng.choice(_ENDS[:-1])
        whole = rng.choice(_FIRST) + b"\r\nHost: a\r\n" + head + end + body + _GOOD * rng.choice((0, 1, 1, 2))
        cuts = sorted(rng.randrange(len(whole)) for _ in range(rng.choice((0, 0, 1, 2))))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        yield Faulty(kind, tuple(pieces))


def _chunked(body: bytes, rng: random.Random) -> bytes:
    cut = rng.randrange(len(body) + 1)
    found = b""
    for piece in filter(None, (body[:cut], body[cut:])):
        found += rng.choice(_SIZES) % len(piece) + rng.choice(_ENDS) + piece + rng.choice(_ENDS)
    return found + rng.choice(_LASTS)


async def answers_to(host: str, port: int, request: Faulty) -> tuple[list[int], str]:
    """Send a request and read until the server closes; return the statuses of the answers and any problem."""
    reader, writer = await asyncio.open_connection(host, port)
    got = b""
    try:
        async with asyncio.timeout(MOST_SECONDS):
            try:
                for piece in request.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01 if len(request.pieces) > 1 else 0)
                while piece := await reader.read(1 << 16):
                    got += piece
            except ConnectionError:
                pass
    except TimeoutError:
        return [], f"not closed after {MOST_SECONDS:g} s: {got[-200:]!r}"
    finally:
        writer.close()
    statuses = [status for each in _STATUS.findall(got) if (status := int(each)) != 100]
    targets = request.targets()
    if b"/smuggled" in got and b"/smuggled" not in targets:
        return statuses, "the body was taken for a request"
    if len(statuses) > len(targets):
        return statuses, f"{len(statuses)} answers to {len(targets)} requests"
    return statuses, "an error of the server" if any(status >= 500 and status != 501 for status in statuses) else ""


async def send(
    host: str, port: int, requests: Iterable[Faulty], clients: int
) -> tuple[Counter[tuple[str, int]], list[str]]:
    """Send requests over `clients` concurrent connections; return counts by fault and first status, and problems."""
    counts: Counter[tuple[str, int]] = Counter()
    wrong: list[str] = []
    left = iter(requests)

    async def client() -> None:
        for request in left:
            statuses, problem = await answers_to(host, port, request)
            counts[request.kind, statuses[0] if statuses else 0] += 1
            if problem:
                wrong.append(f"{request.kind}: {problem}; sent {request.sent[:600]!r}")

    await asyncio.gather(*(client() for _ in range(clients)))
    return counts, wrong


def main() -> int:
    bench = Benchmark(__doc__, requests=20_000, clients=200, seed=0, overrides=True)
    given = bench.given
    with gapless_server([*LIMITS, *given.overrides]) as server:
        began = time.monotonic()
        requests = islice(faulty(given.seed), given.requests)
        counts, wrong = asyncio.run(send(server.host, server.port, requests, given.clients))
        seconds = time.monotonic() - began
        left = server.left()
    for kind, status in sorted(counts):
        bench.row("answers", fault=kind, status=status, requests=counts[kind, status])
    bench.row("totals", requests=given.requests, seconds=seconds, left=left, wrong=len(wrong))
    say(*wrong[:20])
    return bench.end(counts.total() == given.requests and not wrong and not left)


if __name__ == "__main__":
    sys.exit(main())
