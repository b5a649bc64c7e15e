"""Reads the body of a request: from bytes to JSON, and to the body class of a path."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from .body import Body
from .errors import ApiError
from .fields import check_fields

M = TypeVar("M", bound=Body)
_LARGE = 1 << 16  # bytes
_MOST_QUOTED = 40  # characters of an invalid value in an error
_OBJECT = re.compile(r"dictionary( or instance of \w+)?")  # pydantic's words for it


async def read(request: Request, kind: type[M]) -> M:
    """Read the body of a request, and store the names of unknown fields in `request.state.ignored`.

    Raises:
        ApiError: it is not JSON or not a valid body for this path; the error names the invalid field. Or the client
            disconnected before the body was complete.
    """
    try:
        content = await request.body()
    except ClientDisconnect as error:
        raise ApiError(408, "the connection ended before the body was complete") from error
    if len(content) > _LARGE:  # in a thread, so that it does not block the event loop's streams
        return await asyncio.to_thread(_parse, request, kind, content)
    return _parse(request, kind, content)


def _parse(request: Request, kind: type[M], content: bytes) -> M:
    try:
        given = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        given = decode(content)
    if isinstance(given, dict):
        request.state.ignored = check_fields(kind.computed(), given)
    return validated(kind, given)


def decode(content: bytes) -> Any:
    """Decode JSON, also with a byte order mark, in UTF-16 or UTF-32, and with lone surrogates.

    Each lone surrogate becomes U+FFFD.

    Raises:
        ApiError: it is not JSON.
    """
    try:
        text = content.decode(json.detect_encoding(content), errors="surrogatepass").removeprefix("\ufeff")
        text = json.dumps(json.loads(text), ensure_ascii=False)
        return msgspec.json.decode(re.sub("[\ud800-\udfff]", "\ufffd", text))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


def validated(kind: type[M], given: Any) -> M:
    """Validate a decoded body.

    Raises:
        ApiError: it is not a valid body for this path; the error names the invalid field.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        places = [_place(each["loc"], given, is_missing=each["type"] == "missing") for each in found]
        number = max(range(len(places)), key=lambda index: len(places[index]))  # the branch that fits best
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in places[number]).lstrip(".")
        text = _OBJECT.sub("object", found[number]["msg"])
        if found[number]["type"] == "literal_error":
            text += f", not {str(found[number]['input'])[:_MOST_QUOTED]!r}"
        raise ApiError(400, f"{path or 'body'}: {text}", param=path or None) from error


def _place(path: Sequence[str | int], given: Any, *, is_missing: bool) -> list[str | int]:
    """Return the part of an error's path that exists in the body, without pydantic's names of union branches."""
    found: list[str | int] = []
    for part in path:
        is_list, is_dict = isinstance(given, list), isinstance(given, dict)
        if (is_list and isinstance(part, int)) or (is_dict and part in given):
            found, given = [*found, part], given[part]
    return [*found, path[-1]] if is_missing and found[-1:] != [path[-1]] else found
