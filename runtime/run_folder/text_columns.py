"""Tables as text, made by column: row by row, numbers take ten times as long to become text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..core.micro_batch_columns import Floats, Ints

Bools = npt.NDArray[np.bool_]
Cells = npt.NDArray[np.uint8]  # [rows, width]: a column's text; bytes of 0 are no part of it
_ZERO, _POINT, _MINUS = b"0.-"
_GROUP = 4  # digits that are looked up at once
_TEXTS = np.frombuffer("".join([f"{n:04d}" for n in range(10**_GROUP)]).encode(), np.uint32)


def decimals(units: Ints, places: int, known: Bools | None = None) -> Cells:
    """Integers times 10**-`places`, exactly, without zeros that say nothing; empty where not `known`."""
    count = len(units)
    rest = np.abs(units)
    digits = max(places + 1, len(str(int(rest.max(initial=0)))))
    groups = -(-digits // _GROUP)
    text = np.empty((count, groups), np.uint32)
    for group in range(groups - 1, -1, -1):
        rest, low = np.divmod(rest, 10**_GROUP)
        text[:, group] = _TEXTS[low]
    digit = text.view(np.uint8).reshape(count, groups * _GROUP).T  # [digits, rows], the highest first
    point = len(digit) - places
    cells = np.zeros((count, len(digit) + 2), np.uint8)  # a sign, and a point behind the whole part
    cells[units < 0, 0] = _MINUS
    said = np.zeros(count, bool)
    for at in range(point):
        said |= (digit[at] != _ZERO) | (at == point - 1)
        np.multiply(digit[at], said, out=cells[:, 1 + at])
    said = np.zeros(count, bool)
    for at in range(len(digit) - 1, point - 1, -1):
        said |= digit[at] != _ZERO
        np.multiply(digit[at], said, out=cells[:, 2 + at])
    np.multiply(said, np.uint8(_POINT), out=cells[:, 1 + point])
    if known is not None:
        cells *= known[:, None]
    return cells


def nanoseconds(seconds: Floats) -> Ints:
    """What `decimals` takes, with 9 places for seconds."""
    return np.rint(seconds * 1e9).astype(np.int64)


def integers(values: Ints, known: Bools | None = None) -> Cells:
    """As they are; empty where not `known`."""
    return decimals(values, 0, known)


def texts(of: Sequence[bytes]) -> Cells:
    """As they are; they hold no byte of 0."""
    array = np.array(of, np.bytes_)
    return array.view(np.uint8).reshape(len(of), array.itemsize)


def names(codes: Ints, of: Sequence[str]) -> Cells:
    """The names that the codes have in `of`; empty for -1."""
    cells: Cells = texts([name.encode() for name in (*of, "")])[codes]
    return cells


def where(condition: Bools, text: str) -> Cells:
    """The text, or nothing."""
    return names(np.where(condition, 0, -1), [text])


def joined(pieces: Sequence[Cells | bytes]) -> bytes:
    """The rows one after the other, each its cells and what all have alike; columns of as many cells each."""
    (rows, *others) = {len(piece) for piece in pieces if not isinstance(piece, bytes)}
    assert not others, "columns of one table are of one length"
    alike = (np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else piece for piece in pieces)
    shape = [np.broadcast_to(piece, (rows, piece.shape[-1])) for piece in alike]
    text = np.concatenate(shape, axis=1).ravel()
    return text[text != 0].tobytes()


def csv(columns: Sequence[Cells]) -> bytes:
    """Rows of a CSV file; cells need no quotes."""
    return joined([*[piece for column in columns for piece in (b",", column)][1:], b"\n"])
