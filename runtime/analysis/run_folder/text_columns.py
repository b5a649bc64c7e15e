"""Vectorized formatting of number columns as text, ten times faster than row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...core.micro_batch_columns import Floats, Ints

Bools = npt.NDArray[np.bool_]
Cells = npt.NDArray[np.uint8]  # [rows, width]: the text of a column; zero bytes are padding
_ZERO, _POINT, _MINUS = b"0.-"
_GROUP_DIGITS = 4  # digits per table lookup
_GROUP_TEXTS = np.frombuffer("".join([f"{n:04d}" for n in range(10**_GROUP_DIGITS)]).encode(), np.uint32)


def decimals(units: Ints, places: int, known: Bools | None = None) -> Cells:
    """Format integers times 10**-`places` exactly, without trailing zeros; empty if not `known`."""
    count = len(units)
    rest = np.abs(units)
    digits = max(places + 1, len(str(int(rest.max(initial=0)))))
    groups = -(-digits // _GROUP_DIGITS)
    text = np.empty((count, groups), np.uint32)
    for group in range(groups - 1, -1, -1):
        rest, low = np.divmod(rest, 10**_GROUP_DIGITS)
        text[:, group] = _GROUP_TEXTS[low]
    digit = text.view(np.uint8).reshape(count, groups * _GROUP_DIGITS).T  # [digits, rows], the highest first
    point = len(digit) - places
    cells = np.zeros((count, len(digit) + 2), np.uint8)  # with a sign, and a point after the integer part
    cells[units < 0, 0] = _MINUS
    is_shown = np.zeros(count, bool)
    for at in range(point):
        is_shown |= (digit[at] != _ZERO) | (at == point - 1)
        np.multiply(digit[at], is_shown, out=cells[:, 1 + at])
    is_shown = np.zeros(count, bool)
    for at in range(len(digit) - 1, point - 1, -1):
        is_shown |= digit[at] != _ZERO
        np.multiply(digit[at], is_shown, out=cells[:, 2 + at])
    np.multiply(is_shown, np.uint8(_POINT), out=cells[:, 1 + point])
    if known is not None:
        cells *= known[:, None]
    return cells


def integers(values: Ints, known: Bools | None = None) -> Cells:
    """Format integers; empty if not `known`."""
    return decimals(values, 0, known)


def nanoseconds(seconds: Floats) -> Ints:
    """Convert seconds to integer nanoseconds for `decimals`, which formats them as seconds with 9 places."""
    return np.rint(seconds * 1e9).astype(np.int64)


def text_by_code(codes: Ints, texts: Sequence[str]) -> Cells:
    """Return the text of each code, an index into `texts`; empty for -1."""
    array = np.array([text.encode() for text in (*texts, "")], np.bytes_)
    cells: Cells = array.view(np.uint8).reshape(len(array), array.itemsize)[codes]
    return cells


def csv_rows(columns: Sequence[Cells]) -> bytes:
    """Write the rows of a CSV file whose cells need no quotes."""
    ends = [np.full((len(columns[0]), 1), ord(end), np.uint8) for end in "," * (len(columns) - 1) + "\n"]
    text = np.concatenate([piece for pair in zip(columns, ends, strict=True) for piece in pair], axis=1).ravel()
    dense: bytes = text[text != 0].tobytes()
    return dense
