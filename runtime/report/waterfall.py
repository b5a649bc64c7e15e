"""Waterfalls: from one total to another by the parts of the change, as figures of a page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from .chart import ticks
from .difference_words import signed_text
from .formatting import seconds_text, tick_texts, time_unit
from .run_difference import BASE, RUN

WIDTH = 350  # of the drawing, in SVG units
LEFT, RIGHT = 140, 66  # margins: of the labels, and of the numbers
TOP, BOTTOM, ROW, BAR = 6, 36, 21, 13
MAX_PARTS = 9  # rows; the smallest parts of more are one
_LEAST = 0.004  # of the picture's width; parts that are shorter are one
_WRITTEN = 5e-7  # seconds; shorter parts are written as 0 and left out
_CUT = 0.5  # of the highest level: where all are above it, the axis begins beyond 0


@dataclass(frozen=True, slots=True)
class Step:
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
    steps: Sequence[Step]
    note: str = ""

    @property
    def rows(self) -> list[Step]:
        """The steps as they are drawn: the largest first, the small ones as one at the end."""
        low, high = ends([self])
        ranked = sorted(self.steps, key=lambda step: -abs(step.seconds))
        shown = [step for step in ranked[:MAX_PARTS] if abs(step.seconds) >= _LEAST * (high - low)]
        rest = [step for step in ranked if step not in shown and abs(step.seconds) >= _WRITTEN]
        if len(rest) > 1:
            return [*shown, Step(f"{len(rest)} others", sum(step.seconds for step in rest), "s7")]
        return [*shown, *rest]

    @property
    def levels(self) -> list[float]:
        """The totals on the way, from `base` to `run`."""
        levels = [self.base]
        for step in sorted(self.steps, key=lambda step: -abs(step.seconds)):
            levels.append(levels[-1] + step.seconds)
        return [*levels, self.run]


def ends(waterfalls: Sequence[Waterfall]) -> tuple[float, float]:
    """The ends of an axis that all of these share."""
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
    low, high = axis or ends([waterfall])
    rows = waterfall.rows
    height = TOP + (len(rows) + 2) * ROW + BOTTOM
    bottom = height - BOTTOM

    def x(seconds: float) -> float:
        return LEFT + (min(max(seconds, low), high) - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    unit, scale = time_unit(high)
    marks = ticks(low * scale, high * scale, 3)
    grid = "".join(f"M{x(mark / scale):.1f},{TOP}V{bottom}" for mark in marks)
    parts = [f'<path class="grid" d="{grid}"/>']
    for mark, text in zip(marks, tick_texts(marks), strict=True):
        parts.append(f'<text x="{x(mark / scale):.1f}" y="{bottom + 15}" text-anchor="middle">{text}</text>')
    parts.append(f'<path class="axis" d="M{LEFT},{bottom}H{WIDTH - RIGHT}"/>')
    cut = low > 0
    name = f"{unit}; begins at {seconds_text(low)}" if cut else unit
    parts.append(f'<text class="name" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{height - 4}" text-anchor="middle">'
                 f"{name}</text>")  # fmt: skip
    at, y = waterfall.base, float(TOP)
    parts += _bar(BASE, seconds_text(at), x(low), x(at), y, "ink-soft")
    for step in rows:
        y += ROW
        parts.append(f'<path class="mark" d="M{x(at):.1f},{y - (ROW - BAR) / 2 - 4:.1f}V{y + BAR + 4:.1f}"/>')
        after = at + step.seconds
        parts += _bar(step.label, signed_text(step.seconds), x(min(at, after)), x(max(at, after)), y, step.colour)
        at = after
    y += ROW
    parts.append(f'<path class="mark" d="M{x(at):.1f},{y - (ROW - BAR) / 2 - 4:.1f}V{y + BAR + 4:.1f}"/>')
    parts += _bar(RUN, seconds_text(waterfall.run), x(low), x(waterfall.run), y, "ink-soft")
    label = html.escape(f"{waterfall.title}: from {seconds_text(waterfall.base)} to {seconds_text(waterfall.run)}")
    return (
        f"<figure><figcaption>{html.escape(waterfall.title)}</figcaption>"
        f'<ul class="key"></ul><svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
        f'{"".join(parts)}</svg><p class="note">{html.escape(waterfall.note)}</p></figure>'
    )


def _bar(label: str, value: str, left: float, right: float, y: float, colour: str) -> list[str]:
    middle = y + BAR / 2 + 4
    css = "var(--soft)" if colour == "ink-soft" else f"var(--{colour})"
    text = html.escape(label)
    return [
        f'<text class="row" x="{LEFT - 6}" y="{middle:.1f}" text-anchor="end">{text}</text>',
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(0.8, right - left):.1f}" height="{BAR}" class="part" '
        f'style="fill:{css}"><title>{text}: {html.escape(value)}</title></rect>',
        f'<text x="{WIDTH - 2}" y="{middle:.1f}" text-anchor="end">{html.escape(value)}</text>',
    ]
