"""A strip of the pipeline's timeline as SVG: a lane a stage, in a stretch of the run, with a part of it marked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

import numpy as np

from ..core.micro_batch_columns import values_at
from ..ledger.causes import CAUSES
from ..ledger.ledger import Ledger
from .formatting import css_name
from .layout import Line, Places, Shape, Text
from .svg import svg

WIDTH, LEFT, TOP, BOTTOM = 900.0, 58.0, 6.0, 18.0  # SVG units
LANE, GAP = 20.0, 4.0
MAX_STAGES = 16
MAX_BOXES = 80  # in a lane; with more, it shows what each of as many pieces holds most of
_PIECES = 200

Piece = tuple[float, float, str, float, float]  # from, to, colour, top and bottom as shares of the lane


def strip(
    ledger: Ledger, stretch: tuple[float, float], part: tuple[float, float], outlined: Collection[int] = ()
) -> str:
    """Render the strip.

    Args:
        ledger: The run's.
        stretch: Begin and end of what is shown, in seconds on the clock of the ledger.
        part: Begin and end of what is marked.
        outlined: Numbers of micro-batches that get an outline, where there is room for boxes.
    """
    start, end = stretch
    stages = min(ledger.num_stages, MAX_STAGES)
    bottom = TOP + stages * (LANE + GAP)

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT) * min(1.0, max(0.0, (seconds - start) / (end - start)))

    boxes: dict[str, list[Places]] = defaultdict(list)
    outlines: list[Places] = []
    for stage, lane in enumerate(ledger.lanes[:stages]):
        y = TOP + stage * (LANE + GAP)
        for low, high, colour, above, below in _pieces(ledger, stage, start, end):
            left, right = x(low), max(x(low) + 0.4, x(high))
            boxes[colour].append(_corners(left, y + LANE * above, right, y + LANE * below))
        for at in _own(lane.begin, lane.end, start, end):
            if int(lane.micro_batch[at]) in outlined and len(outlines) < MAX_BOXES * stages:
                outlines.append(_corners(x(lane.begin[at]), y - 1, x(lane.end[at]), y + LANE + 1))
    low, high = x(part[0]), x(part[1])
    shapes: list[Shape] = [Line("", places, fill=colour) for colour, places in boxes.items()]
    shapes += [Line("outline", outlines)] if outlines else []
    shapes.append(Line("part", [[(low, 1), (low, bottom)], [(high, 1), (high, bottom)]]))
    shapes += [Text(2, TOP + stage * (LANE + GAP) + LANE - 6, f"stage {stage}") for stage in range(stages)]
    anchor = "start" if low < WIDTH / 2 else "end"
    shapes.append(Text(low, bottom + BOTTOM - 4, f"{part[0] - ledger.t0:,.3f} s", anchor))
    label = f"the pipeline from {start - ledger.t0:.3f} s to {end - ledger.t0:.3f} s"
    return svg(WIDTH, bottom + BOTTOM, label, shapes, css="strip")


def _corners(left: float, top: float, right: float, bottom: float) -> Places:
    return [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]


def _own(begins: np.ndarray, ends: np.ndarray, start: float, end: float) -> range:
    """Return the places of what lies in the stretch, of things in order of time."""
    return range(int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(begins, end, side="left")))


def _pieces(ledger: Ledger, stage: int, start: float, end: float) -> Iterator[Piece]:
    lane, idle = ledger.lanes[stage], ledger.idle_columns[stage]
    boxes, gaps = _own(lane.begin, lane.end, start, end), _own(idle.start, idle.end, start, end)
    columns = ledger.micro_batches
    places = columns.places(lane.micro_batch[boxes.start : boxes.stop])
    prefill, tokens = values_at(columns.prefill, places), values_at(columns.tokens, places)
    share = prefill / np.maximum(tokens, 1)
    colours = ["chunk", "decode", *map(css_name, CAUSES)]
    if max(len(boxes), len(gaps)) <= MAX_BOXES:
        for n, at in enumerate(boxes):
            low, high, cut = float(lane.begin[at]), float(lane.end[at]), float(share[n])
            if cut > 0:
                yield low, high, colours[0], 0.0, cut
            if cut < 1:
                yield low, high, colours[1], cut, 1.0
        for at in gaps:
            yield float(idle.start[at]), float(idle.end[at]), colours[2 + int(idle.cause[at])], 0.25, 0.75
        return
    edges = np.linspace(start, end, _PIECES + 1)
    begins = np.concatenate([lane.begin[boxes.start : boxes.stop], idle.start[gaps.start : gaps.stop]])
    ends = np.concatenate([lane.end[boxes.start : boxes.stop], idle.end[gaps.start : gaps.stop]])
    kinds = np.concatenate([(share < 0.5).astype(np.int64), 2 + idle.cause[gaps.start : gaps.stop]])
    seconds = np.zeros((_PIECES, len(colours)))
    for kind in np.unique(kinds).tolist():
        own = kinds == kind
        times = np.stack([begins[own], ends[own]], axis=1).ravel()
        order = np.argsort(times, kind="stable")
        length = np.stack([np.zeros(int(own.sum())), ends[own] - begins[own]], axis=1).ravel()
        seconds[:, kind] = np.diff(np.interp(edges, times[order], np.cumsum(length[order])))
    most = seconds.argmax(axis=1)
    changes = np.flatnonzero(np.append(True, most[1:] != most[:-1]))
    for first, last in zip(changes.tolist(), [*changes[1:].tolist(), _PIECES], strict=True):
        is_idle = most[first] >= 2
        yield edges[first], edges[last], colours[most[first]], 0.25 * is_idle, 1 - 0.25 * is_idle
