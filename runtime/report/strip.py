"""A strip of the pipeline's timeline as SVG: a lane a stage, in a stretch of the run, with a part of it marked."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Collection, Iterator

import numpy as np

from ..core.micro_batch_columns import values_at
from ..ledger.causes import CAUSES
from ..ledger.ledger import Ledger
from .formatting import css_name

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
    height = TOP + stages * (LANE + GAP) + BOTTOM
    bottom = TOP + stages * (LANE + GAP)

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT) * min(1.0, max(0.0, (seconds - start) / (end - start)))

    paths: dict[str, list[str]] = defaultdict(list)
    marks: list[str] = []
    labels: list[str] = []
    for stage in range(stages):
        y = TOP + stage * (LANE + GAP)
        labels.append(f'<text x="2" y="{y + LANE - 6:.0f}">stage {stage}</text>')
        for low, high, colour, above, below in _pieces(ledger, stage, start, end):
            w, h = max(0.4, x(high) - x(low)), LANE * (below - above)
            paths[colour].append(f"M{x(low):.1f},{y + LANE * above:.1f}h{w:.1f}v{h:.1f}h{-w:.1f}z")
        lane = ledger.lanes[stage]
        for at in _own(lane.begin, lane.end, start, end):
            if int(lane.micro_batch[at]) in outlined and len(marks) < MAX_BOXES * stages:
                low, high = x(lane.begin[at]), x(lane.end[at])
                marks.append(f"M{low:.1f},{y - 1:.1f}H{high:.1f}V{y + LANE + 1:.1f}H{low:.1f}z")
    drawn = "".join(f'<path style="fill:var(--{colour})" d="{"".join(d)}"/>' for colour, d in paths.items())
    low, high = x(part[0]), x(part[1])
    shade = f'<path class="part" d="M{low:.1f},1V{bottom:.0f}M{high:.1f},1V{bottom:.0f}"/>'
    outline = f'<path class="outline" d="{"".join(marks)}"/>' if marks else ""
    texts = "".join(
        f'<text x="{x(at):.1f}" y="{height - 4:.0f}" text-anchor="{anchor}">{at - ledger.t0:,.3f} s</text>'
        for at, anchor in ((part[0], "start" if low < WIDTH / 2 else "end"),)
    )
    label = html.escape(f"the pipeline from {start - ledger.t0:.3f} s to {end - ledger.t0:.3f} s", quote=True)
    return (
        f'<svg class="strip" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{label}">'
        f"{drawn}{outline}{shade}{''.join(labels)}{texts}</svg>"
    )


def _own(begins: np.ndarray, ends: np.ndarray, start: float, end: float) -> range:
    """The places of what lies in the stretch, of things in order of time."""
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
