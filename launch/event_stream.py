"""Parses server-sent events (HTML standard, section 9.2.6)."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventReader:
    """Splits a byte stream, received in arbitrary chunks, into the data of its events.

    A line ends with CR LF, LF or CR. The data lines of an event are joined by line feeds. Comments, other fields and an
    incomplete last event are dropped.
    """

    def __init__(self) -> None:
        self._rest = b""  # incomplete line
        self._data: list[bytes] = []
        self._is_begun = False
        self._ended_with_cr = False

    def push(self, received: bytes) -> Iterator[str]:
        """Yield the data of the events completed by `received`."""
        text = self._rest + received
        if not self._is_begun:
            if len(text) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(text):
                self._rest = text
                return
            text, self._is_begun = text.removeprefix(_BYTE_ORDER_MARK), True
        if self._ended_with_cr and received:
            text, self._ended_with_cr = text.removeprefix(b"\n"), False
        self._ended_with_cr = self._ended_with_cr or text.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(text)
        for line in lines:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data).decode(errors="replace")
                self._data.clear()
