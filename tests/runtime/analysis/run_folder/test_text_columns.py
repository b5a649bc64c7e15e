"""Columns as text: the same as row by row."""

from __future__ import annotations

import io
from csv import reader
from decimal import Decimal

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.analysis.run_folder.text_columns import csv_rows, decimals, integers, text_by_code

NAMES = ("transport", "pb1_prefill_size", "x")
whole = st.integers(-(10**17), 10**17)


def plain(units: int, places: int) -> str:
    """By Python's decimals."""
    text = f"{Decimal(units).scaleb(-places):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@given(st.lists(st.tuples(whole, st.booleans(), st.integers(-1, len(NAMES) - 1))), st.integers(0, 9))
def test_rows_say_what_columns_hold(table: list[tuple[int, bool, int]], places: int):
    units = np.array([row[0] for row in table], np.int64)
    known = np.array([row[1] for row in table], bool)
    codes = np.array([row[2] for row in table], np.int64)
    numbers = [integers(units), decimals(units, places), decimals(units, places, known)]
    text = csv_rows([*numbers, text_by_code(codes, NAMES)])
    read = list(reader(io.StringIO(text.decode())))
    assert text.count(b"\n") == len(table)
    for (value, is_known, code), cells in zip(table, read, strict=True):
        number = plain(value, places)
        assert cells == [str(value), number, number if is_known else "", NAMES[code] if code >= 0 else ""]


def test_zeros():
    units = np.array([0, 1, 10, -10, 1_000_000_000, 12_345_678_901_234])
    assert csv_rows([decimals(units, 9)]).decode().split() == [
        *("0", "0.000000001", "0.00000001", "-0.00000001", "1", "12345.678901234"),
    ]
    assert csv_rows([integers(units)]).decode().split() == list(map(str, units.tolist()))
    assert csv_rows([integers(np.array([], np.int64)), text_by_code(np.array([], np.int64), NAMES)]) == b""
