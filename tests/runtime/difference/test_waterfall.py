"""Tests of waterfalls: bars lead from one total to the other, small parts are one, and the drawing is well-formed."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.difference.waterfall import (
    LEFT,
    MAX_PARTS,
    RIGHT,
    Waterfall,
    WaterfallStep,
    ends,
    waterfall_figure,
)
from gapless.runtime.drawing.layout import WIDTH

SECONDS = st.floats(-5, 5).map(lambda value: round(value, 3))


def bars(waterfall: Waterfall, axis: tuple[float, float] | None = None) -> list[tuple[str, float, float]]:
    """Return the bars as they are drawn: colour, left and right end."""
    figure = ElementTree.fromstring(waterfall_figure(waterfall, axis))
    found = []
    for rect in figure.iter("rect"):
        colour = re.search(r"--([\w-]+)", rect.get("style", ""))
        assert colour is not None
        left = float(rect.get("x", ""))
        found.append((colour[1], left, left + float(rect.get("width", ""))))
    return found


@given(st.floats(6, 100), st.lists(SECONDS, max_size=14))
def test_bars_lead_from_one_total_to_the_other(base: float, parts: list[float]):
    steps = [WaterfallStep(f"part {n} <&>", seconds, f"s{n % 8}") for n, seconds in enumerate(parts)]
    waterfall = Waterfall("a & b", base, base + sum(parts), steps)
    rows = waterfall.rows
    assert len(rows) <= MAX_PARTS + 1
    assert sum(row.seconds for row in rows) == pytest.approx(sum(parts), abs=1e-9)
    low, high = ends([waterfall])
    drawn = bars(waterfall)
    assert len(drawn) == len(rows) + 2
    scale = (WIDTH - LEFT - RIGHT) / (high - low)
    at = base
    for row, (_, left, right) in zip(rows, drawn[1:-1], strict=True):
        end = at + row.seconds
        if min(at, end) >= low:
            assert left == pytest.approx(drawn[0][1] + scale * (min(at, end) - low), abs=0.3)
        assert right - left == pytest.approx(max(0.8, scale * abs(row.seconds)), abs=0.3)
        at = end
    assert high >= max(waterfall.levels)


def test_small_parts_are_one_and_a_far_axis_begins_beyond_0():
    steps = [
        WaterfallStep("large", 2.0, "s0"),
        WaterfallStep("small", 1e-4, "s1"),
        WaterfallStep("smaller", -2e-5, "s2"),
        WaterfallStep("none", 0.0, "s3"),
    ]
    rows = Waterfall("", 10.0, 12.00008, steps).rows
    assert [(row.label, round(row.seconds, 6)) for row in rows] == [("large", 2.0), ("2 others", 8e-5)]
    assert [row.label for row in Waterfall("", 10.0, 12.0001, steps[:2]).rows] == ["large", "small"]
    assert 8 < ends([Waterfall("", 10.0, 12.0, steps[:1])])[0] < 10
    assert ends([Waterfall("", 1.0, 3.0, steps[:1])])[0] == 0.0
    assert ends([Waterfall("", 0.0, 0.0, [])])[1] > 0


def test_pictures_side_by_side_share_an_axis():
    one, other = (
        Waterfall("", 10.0, 12.0, [WaterfallStep("a", 2.0, "s0")]),
        Waterfall("", 10.0, 18.0, [WaterfallStep("a", 8.0, "s0")]),
    )
    axis = ends([one, other])
    assert bars(one, axis)[0] == bars(other, axis)[0]
    widths = [right - left for _, left, right in (bars(one, axis)[1], bars(other, axis)[1])]
    assert widths[1] == pytest.approx(4 * widths[0], abs=0.5)
