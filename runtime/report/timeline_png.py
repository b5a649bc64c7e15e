"""The pipeline over time as a figure for a paper: a lane a stage, a box a micro-batch, idle time hatched by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.run_record import MicroBatchRecord, RunRecord
from ..ledger.ledger import CAUSES, Cause, Floats, Ledger
from .formatting import cause_label, css_name, short_cause_label
from .png import DPI, FONT, light_palette, paper_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

WIDTH, LANE = 7.0, 0.34  # inches: two columns wide; a stage's lane
SHOWN = 14  # micro-batches in the window, where none is given
LETTER = 0.055  # inches that a letter takes


@dataclass(frozen=True, slots=True)
class TimelineWindow:
    """A part of a run: by stage its micro-batches and its idle intervals, in seconds from the part's start."""

    seconds: float
    boxes: list[list[tuple[float, float, MicroBatchRecord | None]]]
    idle: list[list[tuple[float, float, Cause]]]


def timeline_window(record: RunRecord, ledger: Ledger, window: tuple[float, float] | None = None) -> TimelineWindow:
    """`window` is in seconds from the run's start; None: some micro-batches from the middle."""
    start, end = window or middle(ledger)
    micro_batches = {micro_batch.micro_batch: micro_batch for micro_batch in record.micro_batches}
    boxes, idle = [], []
    for lane, gaps in zip(ledger.lanes, ledger.columns, strict=True):
        inside = _inside(lane.begin, lane.end, ledger.t0 + start, end - start)
        boxes.append([(a, b, micro_batches.get(int(lane.micro_batch[i]))) for a, b, i in inside])
        inside = _inside(gaps.start, gaps.end, ledger.t0 + start, end - start)
        idle.append([(a, b, CAUSES[gaps.cause[i]]) for a, b, i in inside])
    return TimelineWindow(end - start, boxes, idle)


def middle(ledger: Ledger) -> tuple[float, float]:
    """Where a few micro-batches in the middle of the run lie, in seconds from its start."""
    first = ledger.lanes[0] if ledger.lanes else None
    if first is None or not len(first.begin):
        return 0.0, max(ledger.span_seconds, 1e-6)
    low = max(0, (len(first.begin) - SHOWN) // 2)
    high = min(len(first.begin), low + SHOWN) - 1
    return float(first.begin[low]) - ledger.t0, float(first.end[high]) - ledger.t0


def write_timeline(path: Path, runs: Mapping[str, TimelineWindow]) -> Path:
    """Stretches of runs under each other, on one scale of time; the file that was written."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    seconds = max(run.seconds for run in runs.values())
    heights = [len(run.boxes) for run in runs.values()]
    with rc_context(paper_style()):
        size = (WIDTH, LANE * 1.25 * sum(heights) + 0.55 * len(runs) + 0.45)
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
    from matplotlib.patches import Rectangle

    palette, unit, num_stages = light_palette(), 1e3 if seconds < 1 else 1.0, len(run.boxes)
    letter = LETTER * seconds / (WIDTH - 0.6)

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
            text(x0, x1, middle_y, short_cause_label(cause), "black")
        for x0, x1, micro_batch in boxes:
            cut = _decode_share(micro_batch)
            box(x0, x1, y, 0.88 * cut, facecolor=palette["decode"], linewidth=0)
            box(x0, x1, y + 0.88 * cut, 0.88 * (1 - cut), facecolor=palette["chunk"], linewidth=0)
            box(x0, x1, y, 0.88, facecolor="none", edgecolor="white", linewidth=0.5)
            text(x0, x1, middle_y, _made_of(micro_batch), palette["panel" if cut < 0.5 else "ink"])
    axes.set_xlim(0, seconds * unit)
    axes.set_ylim(0, num_stages)
    axes.set_yticks([s + 0.5 for s in range(num_stages)])
    axes.set_yticklabels([f"stage {s}" for s in reversed(range(num_stages))])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _inside(start: Floats, end: Floats, origin: float, seconds: float) -> list[tuple[float, float, int]]:
    """Intervals, cut to the window and counted from its start, with their index."""
    kept = np.flatnonzero((end > origin) & (start < origin + seconds))
    a, b = ((side[kept] - origin).clip(0.0, seconds).tolist() for side in (start, end))
    return list(zip(a, b, kept.tolist(), strict=True))


def _decode_share(micro_batch: MicroBatchRecord | None) -> float:
    """Of the box, for decodes: their share of the tokens, but enough to be seen beside a chunk."""
    if micro_batch is None or not micro_batch.num_tokens:
        return 0.0
    share = micro_batch.decode_tokens / micro_batch.num_tokens
    return share if share in (0.0, 1.0) else min(0.85, max(0.15, share))


def _made_of(micro_batch: MicroBatchRecord | None) -> str:
    if micro_batch is None:
        return ""
    if not micro_batch.prefill_tokens:  # how long the contexts are is then what tells micro-batches apart
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
