"""Waterfalls: from one total to another by the parts of the change, as figures of a page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..drawing.chart import ticks
from ..drawing.formatting import seconds_text, tick_texts, time_unit
from ..drawing.layout import WIDTH, Box, Line, Shape, Text
from ..drawing.svg import svg
from .difference_words import signed_text
from .run_difference import BASE, RUN

LEFT, RIGHT = 140, 66  # margins in SVG units: of the labels, and of the numbers
TOP, BOTTOM, ROW, BAR = 6, 36, 21, 13
MAX_PARTS = 9  # rows; the smallest parts of more are one
_LEAST = 0.004  # of the picture's width; parts that are shorter are one
_WRITTEN = 5e-7  # seconds; shorter parts are written as 0 and left out
_CUT = 0.5  # of the highest level: where all are above it, the axis begins beyond 0


@dataclass(frozen=True, slots=True)
class WaterfallStep:
    """A part of the change: its name, seconds, and the colour's name in the style sheet."""

    label: str
    seconds: float
    colour: str


@dataclass(frozen=True, slots=True)
class Waterfall:
    """A waterfall: `steps` lead from `base` to `run`, both in seconds."""

    title: str
    base: float
    run: float
    steps: Sequence[WaterfallStep]
    note: str = ""

    @property
    def rows(self) -> list[WaterfallStep]:
        """The steps as they are drawn: the largest first, the small ones as one at the end."""
        low, high = ends([self])
        ranked = sorted(self.steps, key=lambda step: -abs(step.seconds))
        shown = [step for step in ranked[:MAX_PARTS] if abs(step.seconds) >= _LEAST * (high - low)]
        rest = [step for step in ranked if step not in shown and abs(step.seconds) >= _WRITTEN]
        if len(rest) > 1:
            return [*shown, WaterfallStep(f"{len(rest)} others", sum(step.seconds for step in rest), "s7")]
        return [*shown, *rest]

    @property
    def levels(self) -> list[float]:
        """The totals on the way, from `base` to `run`."""
        levels = [self.base]
        for step in sorted(self.steps, key=lambda step: -abs(step.seconds)):
            levels.append(levels[-1] + step.seconds)
        return [*levels, self.run]


def ends(waterfalls: Sequence[Waterfall]) -> tuple[float, float]:
    """Return the ends of an axis that all of these share."""
    levels = [level for each in waterfalls for level in each.levels]
    low, high = min(levels), max(levels)
    room = 0.06 * ((high - low) or high or 1.0)
    begin = 0.0 if low < _CUT * high or high == low else low - 2 * room
    return min(begin, low), high + room


def waterfall_figure(waterfall: Waterfall, axis: tuple[float, float] | None = None) -> str:
    """Render a waterfall as a `figure` element: well-formed XML with titles on hover.

    Args:
        waterfall: What is drawn.
        axis: The ends of the axis, in seconds; None: its own.
    """
    height = TOP + (len(waterfall.rows) + 2) * ROW + BOTTOM
    label = f"{waterfall.title}: from {seconds_text(waterfall.base)} to {seconds_text(waterfall.run)}"
    drawing = svg(WIDTH, height, label, _shapes(waterfall, *(axis or ends([waterfall])), height))
    return (
        f'<figure><figcaption>{html.escape(waterfall.title)}</figcaption><ul class="key"></ul>{drawing}'
        f'<p class="note">{html.escape(waterfall.note)}</p></figure>'
    )


def _shapes(waterfall: Waterfall, low: float, high: float, height: float) -> Iterator[Shape]:
    bottom = height - BOTTOM

    def x(seconds: float) -> float:
        return LEFT + (min(max(seconds, low), high) - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def bar(label: str, value: str, start: float, end: float, y: float, colour: str) -> Iterator[Shape]:
        left, right, middle = x(min(start, end)), x(max(start, end)), y + BAR / 2 + 4
        yield Text(LEFT - 6, middle, label, "end", "row")
        yield Box(left, y, max(0.8, right - left), BAR, colour, f"{label}: {value}", css="part")
        yield Text(WIDTH - 2, middle, value, "end")

    def link(seconds: float, y: float) -> Shape:
        return Line("mark", [[(x(seconds), y - (ROW - BAR) / 2 - 4), (x(seconds), y + BAR + 4)]])

    unit, scale = time_unit(high)
    marks = ticks(low * scale, high * scale, 3)
    yield Line("grid", [[(x(mark / scale), TOP), (x(mark / scale), bottom)] for mark in marks])
    for mark, text in zip(marks, tick_texts(marks), strict=True):
        yield Text(x(mark / scale), bottom + 15, text, "middle")
    yield Line("axis", [[(LEFT, bottom), (WIDTH - RIGHT, bottom)]])
    name = f"{unit}; begins at {seconds_text(low)}" if low > 0 else unit
    yield Text((LEFT + WIDTH - RIGHT) / 2, height - 4, name, "middle", "name")
    at, y = waterfall.base, float(TOP)
    yield from bar(BASE, seconds_text(at), low, at, y, "soft")
    for step in waterfall.rows:
        y += ROW
        yield link(at, y)
        yield from bar(step.label, signed_text(step.seconds), at, at + step.seconds, y, step.colour)
        at += step.seconds
    yield link(at, y + ROW)
    yield from bar(RUN, seconds_text(waterfall.run), low, waterfall.run, y + ROW, "soft")
