"""The head of a request, beyond what the parser checks: who sends it must agree with us where the request ends."""

from __future__ import annotations

import re
from collections.abc import Sequence

import httptools

from .errors import ApiError

MAX_HEAD = 64 << 10  # bytes of a request's first line and headers
_HOST = re.compile(rb"[\w.~!$&'()*+,;=%-]*(:\d*)?|\[[\da-fA-F:.]+\](:\d*)?", re.ASCII)  # RFC 3986, 3.2.2
_BESIDE = 4  # bytes of a header beside its name and value: a colon, a space and the end of the line

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case


def check_head(parser: httptools.HttpRequestParser, url: bytes, headers: Headers) -> None:
    """Check a whole head.

    RFC 9112, 3.2 (Host) and 6.1 (Transfer-Encoding). The parser itself refuses a second length, a length beside
    chunks, folded lines, and lines that do not end in CRLF.

    Raises:
        ApiError: it is larger than `MAX_HEAD`, or another server may read another length or host out of it.
    """
    size = len(url) + sum(len(name) + len(value) + _BESIDE for name, value in headers)
    if size > MAX_HEAD:
        raise ApiError(431, f"the request's head is larger than {MAX_HEAD >> 10} KiB")
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise ApiError(400, f"HTTP/{version}: this server speaks HTTP/1.1")
    if parser.get_method() == b"CONNECT":
        raise ApiError(400, "CONNECT: this server is no proxy")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        raise ApiError(400, f"Host: must be given once, not {len(hosts)} times")
    if not all(map(_HOST.fullmatch, hosts)):
        raise ApiError(400, "Host: must be a name or an address, and a port")
    codings = b",".join(value for name, value in headers if name == b"transfer-encoding")
    if codings and (version == "1.0" or codings.strip().lower() != b"chunked"):
        raise ApiError(400, "Transfer-Encoding: must be chunked, in HTTP/1.1")


def target(method: bytes, url: bytes) -> bytes:
    """Return the path and the query of a request in its first line, whichever of its forms that has (RFC 9112, 3.2).

    A slash at the path's end says nothing: a redirect would lead clients behind a proxy astray, and lose their keys.

    Raises:
        ApiError: there are none.
    """
    if url == b"*":  # asks for what the whole server takes
        url = b"/" if method == b"OPTIONS" else b""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError as error:
        raise ApiError(400, "the target in the first line: must be a path or a URL") from error
    path = (parsed.path or b"").rstrip(b"/") or b"/"
    return path if parsed.query is None else path + b"?" + parsed.query


def without_upgrade(parser: httptools.HttpRequestParser, url: bytes, headers: Headers) -> bytes:
    """Write a head again without its offer to change the protocol, which a server may pass over (RFC 9110, 7.8)."""
    first = b"%s %s HTTP/%s\r\n" % (parser.get_method(), url, parser.get_http_version().encode())
    return first + b"".join(b"%s: %s\r\n" % header for header in headers if header[0] != b"upgrade") + b"\r\n"
