"""Integer columns: append, sum, iterate. Decodes are sent and recorded by column, as a run has millions of them.

A packed column is `bytes`, eight per integer; messages and records store it in this form.
"""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

from librt.strings import BytesWriter, read_i64_le, write_i64_le
from mypy_extensions import i64

T = TypeVar("T")


class IntColumn:
    """A column of integers to append to."""

    def __init__(self) -> None:
        self._writer = BytesWriter()

    def append(self, value: i64) -> None:
        """Append a 64-bit integer."""
        write_i64_le(self._writer, value)

    @property
    def packed(self) -> bytes:
        """The packed column, as from `pack`."""
        return self._writer.getvalue()


def pack(values: Sequence[int]) -> bytes:
    """Make a packed column."""
    return array("q", values).tobytes()


def unpack(column: bytes) -> memoryview[int]:
    """View a packed column as integers."""
    return memoryview(column).cast("q")


def entries(column: bytes) -> int:
    """Return the number of integers in a packed column."""
    return len(column) // 8


def total(column: bytes) -> int:
    """Sum of the integers in a packed column."""
    summed = 0
    end: i64 = len(column)
    at: i64 = 0
    while at < end:
        summed += read_i64_le(column, at)
        at += 8
    return summed


def append_to_each(lists: list[list[T]], value: T) -> None:
    """Append `value` to each of `lists`.

    They share one object, which saves memory: a micro-batch's end time is appended once per token.
    """
    for values in lists:
        values.append(value)
