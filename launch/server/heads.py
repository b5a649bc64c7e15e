"""Checks of request heads beyond the parser's, against request smuggling."""

from __future__ import annotations

import re
from collections.abc import Sequence

import httptools

from .errors import ApiError

MAX_HEAD = 64 << 10  # bytes of a request's first line and headers
_HOST = re.compile(rb"[\w.~!$&'()*+,;=%-]*(:\d*)?|\[[\da-fA-F:.]+\](:\d*)?", re.ASCII)  # RFC 3986, 3.2.2
_BESIDE = 4  # bytes of a header in addition to its name and value: a colon, a space and CRLF

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case


def check_head(parser: httptools.HttpRequestParser, url: bytes, headers: Headers) -> None:
    """Check a complete head.

    RFC 9112, 3.2 (Host) and 6.1 (Transfer-Encoding). The parser itself refuses a second length, a length together with
    chunks, folded lines, and lines that do not end in CRLF.

    Raises:
        ApiError: it is larger than `MAX_HEAD`, or ambiguous: another server might see another length or host.
    """
    size = len(url) + sum(len(name) + len(value) + _BESIDE for name, value in headers)
    if size > MAX_HEAD:
        raise ApiError(431, f"the request's head is larger than {MAX_HEAD >> 10} KiB")
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise ApiError(400, f"HTTP/{version}: unsupported version; use HTTP/1.1")
    if parser.get_method() == b"CONNECT":
        raise ApiError(400, "CONNECT: not supported; this server is not a proxy")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        raise ApiError(400, f"Host: must be given once, not {len(hosts)} times")
    if not all(map(_HOST.fullmatch, hosts)):
        raise ApiError(400, "Host: must be a host name or an address, optionally with a port")
    codings = b",".join(value for name, value in headers if name == b"transfer-encoding")
    if codings and (version == "1.0" or codings.strip().lower() != b"chunked"):
        raise ApiError(400, "Transfer-Encoding: must be chunked, and the version HTTP/1.1")


def target(method: bytes, url: bytes) -> bytes:
    """Return the path and query from the first line, in any of its forms (RFC 9112, 3.2).

    A trailing slash is ignored: a redirect would misdirect clients behind a proxy and drop their keys.

    Raises:
        ApiError: the target is invalid.
    """
    if url == b"*":  # the server as a whole
        url = b"/" if method == b"OPTIONS" else b""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError as error:
        raise ApiError(400, "request target: must be a path or a URL") from error
    path = (parsed.path or b"").rstrip(b"/") or b"/"
    return path if parsed.query is None else path + b"?" + parsed.query


def without_upgrade(parser: httptools.HttpRequestParser, url: bytes, headers: Headers) -> bytes:
    """Serialize a head without its Upgrade header, which a server may ignore (RFC 9110, 7.8)."""
    first = b"%s %s HTTP/%s\r\n" % (parser.get_method(), url, parser.get_http_version().encode())
    return first + b"".join(b"%s: %s\r\n" % header for header in headers if header[0] != b"upgrade") + b"\r\n"
