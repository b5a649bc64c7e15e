"""Columns of numbers: append, sum, iterate. Micro-batches are sent and recorded by column, and runs have millions.

A column of integers is `bytes`, eight a number, so that messages and records hold it as it is.
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
    """A column of integers that grows; `packed` are its bytes."""

    def __init__(self) -> None:
        self._writer = BytesWriter()

    def append(self, value: i64) -> None:
        write_i64_le(self._writer, value)

    @property
    def packed(self) -> bytes:
        return self._writer.getvalue()


def pack(values: Sequence[int]) -> bytes:
    return array("q", values).tobytes()


def unpack(column: bytes) -> memoryview[int]:
    return memoryview(column).cast("q")


def entries(column: bytes) -> int:
    """Number of integers in a column."""
    return len(column) // 8


def total(column: bytes) -> int:
    """Sum of a column."""
    summed = 0
    end: i64 = len(column)
    at: i64 = 0
    while at < end:
        summed += read_i64_le(column, at)
        at += 8
    return summed


def append_to_each(lists: list[list[T]], value: T) -> None:
    """Append one object to several lists, which share it."""
    for values in lists:
        values.append(value)
