"""Draws the pipeline timeline for a paper: one lane per stage, one box per micro-batch, idle time hatched by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.micro_batch_columns import Floats, Ints, values_at
from ...core.numbers import percent_text, seconds_text
from ...core.run_record import FaultRecord
from ...core.whole_file import whole_file
from ..ledger.causes import CAUSES, Cause
from ..ledger.idle import IdleColumns
from ..ledger.lanes import Lane
from ..ledger.ledger import Ledger
from .formatting import cause_label, css_name, short_cause_label
from .png import DPI, FONT, light_palette, paper_style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.0  # inches: both columns of a two-column paper
LANE_HEIGHT = 0.34  # inches
LETTER_WIDTH = 0.055  # inches, about
MICRO_BATCHES = 20  # per stage, in a window that is not given


@dataclass(frozen=True, slots=True)
class TimelineWindow:
    """The data for drawing a window of a run, without the record.

    Attributes:
        t0: Start of the run, on the clock of lanes and idle.
        lanes, idle: Compute and idle intervals of each stage.
        contents: For each stage, prefill tokens, decodes and context tokens of each micro-batch, [micro-batches, 3].
        seconds: Length of the run.
        faults: Pipeline faults and their recoveries.
        window: Start and end, in seconds from the run's start; None: one in the middle of the run, by `windows_of`.
    """

    t0: float
    lanes: list[Lane]
    idle: list[IdleColumns]
    contents: list[Ints]
    seconds: float
    faults: list[FaultRecord]
    window: tuple[float, float] | None

    @classmethod
    def of(cls, ledger: Ledger, window: tuple[float, float] | None = None) -> TimelineWindow:
        """Extract the data for drawing a window of a run."""
        columns, contents = ledger.micro_batches, []
        for lane in ledger.lanes:
            places = columns.places(lane.micro_batch)
            held = [values_at(column, places) for column in (columns.prefill, columns.decodes, columns.context)]
            contents.append(np.stack(held, axis=1))
        return cls(ledger.t0, ledger.lanes, ledger.idle_columns, contents, ledger.span_seconds, ledger.faults, window)

    @property
    def seconds_shown(self) -> float:
        """Average duration of a window of `MICRO_BATCHES` micro-batches, in seconds."""
        return self.seconds * MICRO_BATCHES / max(1, *(len(lane.begin) for lane in self.lanes))

    def middle(self, seconds: float) -> tuple[float, float]:
        """Return start and end of the window of `seconds` in the middle of the run; the whole run if it is shorter."""
        start = max(0.0, (self.seconds - seconds) / 2)
        return start, max(min(start + seconds, self.seconds), 1e-6)

    def idle_share(self, start: float, end: float) -> float:
        """Return the share of stage time in a window that is idle."""
        gaps = [_inside(idle.start - self.t0, idle.end - self.t0, start, end) for idle in self.idle]
        return sum(x1 - x0 for stage in gaps for x0, x1, _ in stage) / ((end - start) * max(1, len(self.lanes)))


def windows_of(runs: Sequence[TimelineWindow]) -> list[tuple[float, float]]:
    """Return start and end of each run's window: the given one, or one in the middle of the run.

    Windows that are not given last as long as `MICRO_BATCHES` micro-batches of the slowest run.
    """
    seconds = max((run.seconds_shown for run in runs if run.window is None), default=0.0)
    return [run.window or run.middle(seconds) for run in runs]


def write_timeline(path: Path, runs: Mapping[str, TimelineWindow]) -> Path:
    """Draw windows of runs below each other, on one time scale, into the PNG `path`; return `path`."""
    from matplotlib.figure import Figure

    figure = Figure(dpi=DPI, layout="constrained")
    draw_timeline(runs, figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=DPI, metadata={"Software": None})
    return path


def draw_timeline(runs: Mapping[str, TimelineWindow], figure: Figure) -> None:
    """Draw windows of runs below each other, on one time scale, into an empty figure; set the figure's size."""
    from matplotlib import rc_context

    windows = windows_of(list(runs.values()))
    seconds = max(end - start for start, end in windows)
    heights = [len(run.lanes) for run in runs.values()]
    seen: set[Cause] = set()
    reasons: list[str] = []
    figure.set_size_inches(WIDTH, LANE_HEIGHT * 1.25 * sum(heights) + 0.6 * len(runs) + 0.7)
    with rc_context(paper_style()):
        rows = figure.subplots(len(runs), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (name, run), (start, end) in zip(rows, runs.items(), windows, strict=True):
            seen |= _draw(axes, run, start, end, seconds)
            reasons += _mark_faults(axes, run, start, end)
            axes.set_title(name, loc="left", fontweight="bold")
            axes.set_title(idle_text(run, start, end), loc="right", fontsize=FONT - 1)
        rows[-1].set_xlabel("\n".join(["seconds from the run's start", *_choice(runs, seconds)]))
        handles = _legend([cause for cause in CAUSES if cause in seen], reasons)
        title = "124+9d: a chunk of 124 tokens and 9 decodes;  9d/5.1K: 9 decodes over 5.1K tokens of context"
        columns = -(-len(handles) // -(-len(handles) // 5))  # at most 5, in rows of like length
        font = {"title_fontsize": FONT - 1, "handlelength": 1.6}
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, title=title, **font)


def idle_text(run: TimelineWindow, start: float, end: float) -> str:
    """Format the idle share of a window's stage time and, for comparison, of the whole run's."""
    whole = run.idle_share(0.0, max(run.seconds, 1e-9))
    return f"idle {percent_text(run.idle_share(start, end))} of this window, {percent_text(whole)} of the run"


def _choice(runs: Mapping[str, TimelineWindow], seconds: float) -> list[str]:
    """Describe how the windows were chosen; empty if one was given."""
    if any(run.window is not None for run in runs.values()):
        return []
    if all(run.seconds <= seconds for run in runs.values()):
        return ["(the whole run)"]
    each = "each run's" if len(runs) > 1 else "the run's"
    return [f"({each} middle {seconds_text(seconds)})"]


def _draw(axes: Axes, run: TimelineWindow, start: float, end: float, seconds: float) -> set[Cause]:
    """Draw one window on a time axis that is `seconds` long; return the causes in it."""
    from matplotlib.patches import Rectangle

    palette, num_stages, seen = light_palette(), len(run.lanes), set()
    letter = LETTER_WIDTH * seconds / (WIDTH - 0.6)  # width of a letter, in seconds of the time axis

    def box(x0: float, x1: float, y: float, height: float, **style: Any) -> None:
        axes.add_patch(Rectangle((x0, y), x1 - x0, height, **style))

    def text(x0: float, x1: float, y: float, words: str, colour: str) -> None:
        if x1 - x0 > letter * len(words):
            axes.text((x0 + x1) / 2, y, words, ha="center", va="center", color=colour, fontsize=FONT - 1.2)

    for stage, (lane, gaps, contents) in enumerate(zip(run.lanes, run.idle, run.contents, strict=True)):
        y, middle_y = num_stages - stage - 0.94, num_stages - stage - 0.5
        for x0, x1, i in _inside(gaps.start - run.t0, gaps.end - run.t0, start, end):
            cause = CAUSES[gaps.cause[i]]
            seen.add(cause)
            box(x0, x1, y, 0.88, facecolor=palette[css_name(cause)], hatch="/////", edgecolor="white", linewidth=0)
            text(x0, x1, middle_y, short_cause_label(cause), _ink_on(palette[css_name(cause)]))
        for x0, x1, i in _inside(lane.begin - run.t0, lane.end - run.t0, start, end):
            prefill, decodes, context = contents[i].tolist()
            cut = _decode_share(prefill, decodes)
            box(x0, x1, y, 0.88 * cut, facecolor=palette["decode"], linewidth=0)
            box(x0, x1, y + 0.88 * cut, 0.88 * (1 - cut), facecolor=palette["chunk"], linewidth=0)
            box(x0, x1, y, 0.88, facecolor="none", edgecolor="white", linewidth=0.5)
            text(x0, x1, middle_y, _composition(prefill, decodes, context), palette["panel" if cut < 0.5 else "ink"])
    axes.set_xlim(start, start + seconds)
    axes.ticklabel_format(axis="x", useOffset=False, style="plain")
    axes.set_ylim(0, num_stages)
    axes.set_yticks([s + 0.5 for s in range(num_stages)], [f"stage {s}" for s in reversed(range(num_stages))])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return seen


def _mark_faults(axes: Axes, run: TimelineWindow, start: float, end: float) -> list[str]:
    """Draw a solid line at the detection of each fault, and a dashed one at its recovery.

    Returns:
        The reasons of the faults in the window.
    """
    reasons = []
    for fault in run.faults:
        for at, style in ((fault.detected, "-"), (fault.up, "--")):
            if at is not None and start <= at - run.t0 <= end:
                axes.axvline(at - run.t0, color=light_palette()["ink"], linestyle=style, linewidth=1.1)
                reasons.append(str(fault.reason))
    return reasons


def _ink_on(colour: str) -> str:
    """Return black or white, whichever is readable on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else "white"


def _inside(begin: Floats, end: Floats, first: float, last: float) -> list[tuple[float, float, int]]:
    """Clip intervals to the window from `first` to `last`; return begin, end and index of each that overlaps it."""
    kept = np.flatnonzero((end > first) & (begin < last))
    a, b = (side[kept].clip(first, last).tolist() for side in (begin, end))
    return list(zip(a, b, kept.tolist(), strict=True))


def _decode_share(prefill: int, decodes: int) -> float:
    """Return the share of a box drawn for decodes: their share of the tokens, at least 15% alongside a chunk."""
    if not prefill + decodes:
        return 0.0
    share = decodes / (prefill + decodes)
    return share if share in (0.0, 1.0) else min(0.85, max(0.15, share))


def _composition(prefill: int, decodes: int, context: int) -> str:
    """Format the composition of a micro-batch: `124+9d`; without a chunk, its decodes and their context: `9d/5.1K`."""
    if prefill:
        return f"{prefill}" + (f"+{decodes}d" if decodes else "")
    if not decodes:
        return ""
    return f"{decodes}d/{context / 1000:.1f}K" if context >= 1000 else f"{decodes}d/{context}"


def _legend(causes: Sequence[Cause], reasons: Sequence[str]) -> list[Artist]:
    """Return legend handles for tokens, for the idle time of these causes, and for fault lines with these reasons."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    palette = light_palette()
    samples: list[Artist] = [Patch(facecolor=palette[kind], label=f"{kind} tokens") for kind in ("chunk", "decode")]
    for cause in causes:
        colour = palette[css_name(cause)]
        samples.append(Patch(facecolor=colour, hatch="/////", edgecolor="white", label=cause_label(cause)))
    if reasons:
        ink, named = palette["ink"], ", ".join(dict.fromkeys(reasons))
        samples.append(Line2D([], [], color=ink, linewidth=1.1, label=f"fault ({named})"))
        samples.append(Line2D([], [], color=ink, linewidth=1.1, linestyle="--", label="recovered"))
    return samples
