"""Draws the pipeline over time for a paper: a lane per stage, a box per micro-batch, idle time hatched by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.micro_batch_columns import Floats
from ..core.run_record import MicroBatchRecord, RunRecord
from ..ledger.causes import CAUSES, Cause
from ..ledger.ledger import Ledger
from .formatting import cause_label, css_name, short_cause_label
from .png import DPI, FONT, light_palette, paper_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

WIDTH = 7.0  # inches: both columns of a two-column paper
LANE_HEIGHT = 0.34  # inches
LETTER_WIDTH = 0.055  # inches, about
DEFAULT_MICRO_BATCHES = 14  # micro-batches in a window that is not given


@dataclass(frozen=True, slots=True)
class TimelineWindow:
    """A window of a run. Times are seconds from the window's start.

    Attributes:
        seconds: Length of the window.
        boxes: For each stage, the begin, the end and the record of each micro-batch; None: it has no record.
        idle: For each stage, the start, the end and the cause of each idle interval.
    """

    seconds: float
    boxes: list[list[tuple[float, float, MicroBatchRecord | None]]]
    idle: list[list[tuple[float, float, Cause]]]


def timeline_window(record: RunRecord, ledger: Ledger, window: tuple[float, float] | None = None) -> TimelineWindow:
    """Cut a window out of a run.

    Args:
        record: The run.
        ledger: Its ledger.
        window: Start and end, in seconds from the run's start; None: some micro-batches in the middle of the run.
    """
    start, end = window or middle_window(ledger)
    micro_batches = {micro_batch.micro_batch: micro_batch for micro_batch in record.micro_batches}
    boxes, idle = [], []
    for lane, gaps in zip(ledger.lanes, ledger.idle_columns, strict=True):
        inside = _inside(lane.begin, lane.end, ledger.t0 + start, end - start)
        boxes.append([(a, b, micro_batches.get(int(lane.micro_batch[i]))) for a, b, i in inside])
        inside = _inside(gaps.start, gaps.end, ledger.t0 + start, end - start)
        idle.append([(a, b, CAUSES[gaps.cause[i]]) for a, b, i in inside])
    return TimelineWindow(end - start, boxes, idle)


def middle_window(ledger: Ledger) -> tuple[float, float]:
    """Return start and end of a few micro-batches in the middle of the run, in seconds from the run's start."""
    first = ledger.lanes[0] if ledger.lanes else None
    if first is None or not len(first.begin):
        return 0.0, max(ledger.span_seconds, 1e-6)
    low = max(0, (len(first.begin) - DEFAULT_MICRO_BATCHES) // 2)
    high = min(len(first.begin), low + DEFAULT_MICRO_BATCHES) - 1
    return float(first.begin[low]) - ledger.t0, float(first.end[high]) - ledger.t0


def write_timeline(path: Path, runs: Mapping[str, TimelineWindow]) -> Path:
    """Draw windows of runs below each other, on one scale of time, into the PNG `path`; return `path`."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    seconds = max(run.seconds for run in runs.values())
    heights = [len(run.boxes) for run in runs.values()]
    with rc_context(paper_style()):
        size = (WIDTH, LANE_HEIGHT * 1.25 * sum(heights) + 0.55 * len(runs) + 0.45)
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        rows = figure.subplots(len(runs), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (name, run) in zip(rows, runs.items(), strict=True):
            _draw(axes, run, seconds)
            axes.set_title(name, loc="left", fontweight="bold")
        rows[-1].set_xlabel("time [ms]" if seconds < 1 else "time [s]")
        seen = {cause for run in runs.values() for lane in run.idle for *_, cause in lane}
        handles = _legend([cause for cause in CAUSES if cause in seen])
        title = "124+9d: a chunk of 124 tokens and 9 decodes;  9d/5.1K: 9 decodes over 5.1K tokens of context"
        figure.legend(
            handles=handles, loc="outside lower center", ncols=5, handlelength=1.6, title=title, title_fontsize=FONT - 1
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path


def _draw(axes: Axes, run: TimelineWindow, seconds: float) -> None:
    """Draw one window; the time axis is `seconds` long."""
    from matplotlib.patches import Rectangle

    palette, unit, num_stages = light_palette(), 1e3 if seconds < 1 else 1.0, len(run.boxes)
    letter = LETTER_WIDTH * seconds / (WIDTH - 0.6)  # seconds of the time axis that a letter takes

    def box(x0: float, x1: float, y: float, height: float, **style: Any) -> None:
        axes.add_patch(Rectangle((x0 * unit, y), (x1 - x0) * unit, height, **style))

    def text(x0: float, x1: float, y: float, words: str, colour: str) -> None:
        if x1 - x0 > letter * len(words):
            x = (x0 + x1) / 2 * unit
            axes.text(x, y, words, ha="center", va="center", color=colour, fontsize=FONT - 1.2)

    for stage, (boxes, idle) in enumerate(zip(run.boxes, run.idle, strict=True)):
        y, middle_y = num_stages - stage - 0.94, num_stages - stage - 0.5
        for x0, x1, cause in idle:
            box(x0, x1, y, 0.88, facecolor=palette[css_name(cause)], hatch="/////", edgecolor="white", linewidth=0)
            text(x0, x1, middle_y, short_cause_label(cause), _ink_on(palette[css_name(cause)]))
        for x0, x1, micro_batch in boxes:
            cut = _decode_share(micro_batch)
            box(x0, x1, y, 0.88 * cut, facecolor=palette["decode"], linewidth=0)
            box(x0, x1, y + 0.88 * cut, 0.88 * (1 - cut), facecolor=palette["chunk"], linewidth=0)
            box(x0, x1, y, 0.88, facecolor="none", edgecolor="white", linewidth=0.5)
            text(x0, x1, middle_y, _composition(micro_batch), palette["panel" if cut < 0.5 else "ink"])
    axes.set_xlim(0, seconds * unit)
    axes.set_ylim(0, num_stages)
    axes.set_yticks([s + 0.5 for s in range(num_stages)])
    axes.set_yticklabels([f"stage {s}" for s in reversed(range(num_stages))])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _ink_on(colour: str) -> str:
    """Return black or white, whichever can be read on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else "white"


def _inside(start: Floats, end: Floats, origin: float, seconds: float) -> list[tuple[float, float, int]]:
    """Cut intervals to a window. Returns start and end, counted from the window's start, and the interval's index.

    Args:
        start, end: The intervals, in seconds.
        origin: Start of the window, in seconds.
        seconds: Length of the window.
    """
    kept = np.flatnonzero((end > origin) & (start < origin + seconds))
    a, b = ((side[kept] - origin).clip(0.0, seconds).tolist() for side in (start, end))
    return list(zip(a, b, kept.tolist(), strict=True))


def _decode_share(micro_batch: MicroBatchRecord | None) -> float:
    """Return the share of a box that is drawn for decodes: their share of the tokens, at least 15% beside a chunk."""
    if micro_batch is None or not micro_batch.num_tokens:
        return 0.0
    share = micro_batch.decode_tokens / micro_batch.num_tokens
    return share if share in (0.0, 1.0) else min(0.85, max(0.15, share))


def _composition(micro_batch: MicroBatchRecord | None) -> str:
    """Write what a micro-batch holds: `124+9d`; without a chunk, its decodes and their context: `9d/5.1K`."""
    if micro_batch is None:
        return ""
    if not micro_batch.prefill_tokens:
        context = micro_batch.decode_context
        return (
            f"{micro_batch.decode_tokens}d/{context / 1000:.1f}K"
            if context >= 1000
            else f"{micro_batch.decode_tokens}d/{context}"
        )
    return f"{micro_batch.prefill_tokens}" + (f"+{micro_batch.decode_tokens}d" if micro_batch.decode_tokens else "")


def _legend(causes: Sequence[Cause]) -> list[Patch]:
    from matplotlib.patches import Patch

    palette = light_palette()
    handles = [Patch(facecolor=palette[kind], label=f"{kind} tokens") for kind in ("chunk", "decode")]
    for cause in causes:
        colour = palette[css_name(cause)]
        handles.append(Patch(facecolor=colour, hatch="/////", edgecolor="white", label=cause_label(cause)))
    return handles
