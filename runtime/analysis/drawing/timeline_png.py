"""Draws the pipeline over time for a paper: a lane per stage, a box per micro-batch, idle time hatched by cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.micro_batch_columns import Floats, Ints, values_at
from ..core.run_record import FaultRecord
from ..ledger.causes import CAUSES, Cause
from ..ledger.idle import IdleColumns
from ..ledger.lanes import Lane
from ..ledger.ledger import Ledger
from ..run_folder.files import whole_file
from .formatting import cause_label, css_name, percent_text, seconds_text, short_cause_label
from .png import DPI, FONT, light_palette, paper_style
from .typical_window import TimeShares

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.0  # inches: both columns of a two-column paper
LANE_HEIGHT = 0.34  # inches
LETTER_WIDTH = 0.055  # inches, about
MICRO_BATCHES = 20  # on a stage, in a window that is not given


@dataclass(frozen=True, slots=True)
class TimelineWindow:
    """What a window of a run is drawn from. It holds no record.

    Attributes:
        t0: Begin of the run, on the clock of lanes and idle.
        lanes, idle: What each stage computed, and when it idled.
        contents: For each stage, of each of its micro-batches: prompt tokens, decodes, KV tokens that they attend to.
        shares: What stage time goes to, in the run and in windows.
        faults: Of the pipeline, with their repairs.
        window: Start and end, in seconds from the run's start; None: a typical window, which `windows_of` finds.
    """

    t0: float
    lanes: list[Lane]
    idle: list[IdleColumns]
    contents: list[Ints]
    shares: TimeShares
    faults: list[FaultRecord]
    window: tuple[float, float] | None

    @classmethod
    def of(cls, ledger: Ledger, window: tuple[float, float] | None = None) -> TimelineWindow:
        """Take from a run what a window of it is drawn from."""
        columns, contents = ledger.micro_batches, []
        for lane in ledger.lanes:
            places = columns.places(lane.micro_batch)
            held = [values_at(column, places) for column in (columns.prefill, columns.decodes, columns.context)]
            contents.append(np.stack(held, axis=1))
        return cls(ledger.t0, ledger.lanes, ledger.idle_columns, contents, TimeShares(ledger), ledger.faults, window)

    @property
    def seconds_shown(self) -> float:
        """Seconds that a window of some micro-batches lasts on average."""
        return self.shares.seconds * MICRO_BATCHES / max(1, *(len(lane.begin) for lane in self.lanes))


def windows_of(runs: Sequence[TimelineWindow]) -> list[tuple[float, float]]:
    """Return start and end of each run's window: the one that was given, or a typical one.

    Typical windows are as long as some micro-batches take in the slowest run.
    """
    seconds = max((run.seconds_shown for run in runs if run.window is None), default=0.0)
    return [run.window or run.shares.typical(seconds) for run in runs]


def write_timeline(path: Path, runs: Mapping[str, TimelineWindow]) -> Path:
    """Draw windows of runs below each other, on one scale of time, into the PNG `path`; return `path`."""
    from matplotlib.figure import Figure

    figure = Figure(dpi=DPI, layout="constrained")
    draw_timeline(runs, figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        figure.savefig(part, format="png", dpi=DPI, metadata={"Software": None})
    return path


def draw_timeline(runs: Mapping[str, TimelineWindow], figure: Figure) -> None:
    """Draw windows of runs below each other, on one scale of time, into an empty figure, and give it their size."""
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
            axes.set_title(idle_text(run.shares, start, end), loc="right", fontsize=FONT - 1)
        rows[-1].set_xlabel("\n".join(["seconds from the run's start", *_choice(runs, seconds)]))
        handles = _legend([cause for cause in CAUSES if cause in seen], reasons)
        title = "124+9d: a chunk of 124 tokens and 9 decodes;  9d/5.1K: 9 decodes over 5.1K tokens of context"
        columns = -(-len(handles) // -(-len(handles) // 5))  # at most 5, in rows of like length
        font = {"title_fontsize": FONT - 1, "handlelength": 1.6}
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, title=title, **font)


def idle_text(shares: TimeShares, start: float, end: float) -> str:
    """Write how much of its stage time a window is idle, beside the whole run."""
    whole = shares.idle(0.0, max(shares.seconds, 1e-9))
    return f"idle {percent_text(shares.idle(start, end))} of this window, {percent_text(whole)} of the run"


def _choice(runs: Mapping[str, TimelineWindow], seconds: float) -> list[str]:
    """Say how the windows were chosen, where nobody gave them."""
    if any(run.window is not None for run in runs.values()):
        return []
    if all(run.shares.seconds <= seconds for run in runs.values()):
        return ["(the whole run)"]
    each = "each run's" if len(runs) > 1 else "the run's"
    return [f"({each} {seconds_text(seconds)} whose stage time is spent the most like the whole run's)"]


def _draw(axes: Axes, run: TimelineWindow, start: float, end: float, seconds: float) -> set[Cause]:
    """Draw one window on a time axis that is `seconds` long; return the causes in it."""
    from matplotlib.patches import Rectangle

    palette, num_stages, seen = light_palette(), len(run.lanes), set()
    letter = LETTER_WIDTH * seconds / (WIDTH - 0.6)  # seconds of the time axis that a letter takes

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
    """Draw a line where each fault was noticed, and one where the stages stood again.

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
    """Return black or white, whichever can be read on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else "white"


def _inside(begin: Floats, end: Floats, first: float, last: float) -> list[tuple[float, float, int]]:
    """Cut intervals to the window from `first` to `last`; return begin, end and index of each that is left."""
    kept = np.flatnonzero((end > first) & (begin < last))
    a, b = (side[kept].clip(first, last).tolist() for side in (begin, end))
    return list(zip(a, b, kept.tolist(), strict=True))


def _decode_share(prefill: int, decodes: int) -> float:
    """Return the share of a box that is drawn for decodes: their share of the tokens, at least 15% beside a chunk."""
    if not prefill + decodes:
        return 0.0
    share = decodes / (prefill + decodes)
    return share if share in (0.0, 1.0) else min(0.85, max(0.15, share))


def _composition(prefill: int, decodes: int, context: int) -> str:
    """Write what a micro-batch holds: `124+9d`; without a chunk, its decodes and their context: `9d/5.1K`."""
    if prefill:
        return f"{prefill}" + (f"+{decodes}d" if decodes else "")
    if not decodes:
        return ""
    return f"{decodes}d/{context / 1000:.1f}K" if context >= 1000 else f"{decodes}d/{context}"


def _legend(causes: Sequence[Cause], reasons: Sequence[str]) -> list[Artist]:
    """Return samples of tokens, of the idle time of these causes, and of the lines of faults for these reasons."""
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
