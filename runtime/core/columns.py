"""Integers as bytes, eight each: what a micro-batch's decodes travel and are kept as."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from librt.strings import read_i64_le
from mypy_extensions import i64


def pack(values: Sequence[int]) -> bytes:
    return array("q", values).tobytes()


def unpack(column: bytes) -> memoryview[int]:
    return memoryview(column).cast("q")


def entries(column: bytes) -> int:
    return len(column) // 8


def total(column: bytes) -> int:
    """Of its integers, summed."""
    summed = 0
    end: i64 = len(column)
    at: i64 = 0
    while at < end:
        summed += read_i64_le(column, at)
        at += 8
    return summed
