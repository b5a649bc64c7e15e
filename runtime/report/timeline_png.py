"""The pipeline over time as a figure for a paper: a lane a stage, a box a micro-batch, idle time hatched by cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..ledger import CAUSES, Ledger
from ..spans import RunRecord, StepRecord
from .png import DPI, FONT, light_palette, paper_style
from .text import css_name, label, short_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, LANE = 7.0, 0.34  # inches: two columns wide; a stage's lane
SHOWN = 14  # micro-batches in the window, where none is given
LETTER = 0.055  # inches that a letter takes


def write_timeline(
    path: Path,
    runs: Sequence[tuple[str, RunRecord, Ledger]],
    windows: Sequence[tuple[float, float]] | None = None,
) -> Path:
    """Runs under each other, on one scale of time; the file that was written.

    Args:
        windows: of each run, seconds from its start; None: some micro-batches from the middle of each.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    windows = windows or [middle(ledger) for *_, ledger in runs]
    seconds = max(end - start for start, end in windows)
    lanes = sum(ledger.num_stages for *_, ledger in runs)
    with rc_context(paper_style()):
        heights = [ledger.num_stages for *_, ledger in runs]
        size = (WIDTH, LANE * 1.25 * lanes + 0.55 * len(runs) + 0.45)
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        rows = figure.subplots(len(runs), 1, squeeze=False, height_ratios=heights)[:, 0]
        seen: set[int] = set()
        for axes, (name, record, ledger), (start, _) in zip(rows, runs, windows, strict=True):
            seen |= _draw(axes, record, ledger, start, seconds)
            axes.set_title(name, loc="left", fontweight="bold")
        rows[-1].set_xlabel("time [ms]" if seconds < 1 else "time [s]")
        figure.legend(handles=_legend(sorted(seen)), loc="outside lower center", ncols=5, handlelength=1.6)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path


def middle(ledger: Ledger) -> tuple[float, float]:
    """Where a few micro-batches in the middle of the run lie, in seconds from its start."""
    first = ledger.lanes[0] if ledger.lanes else None
    if first is None or not len(first.begin):
        return 0.0, max(ledger.span_seconds, 1e-6)
    low = max(0, (len(first.begin) - SHOWN) // 2)
    high = min(len(first.begin), low + SHOWN) - 1
    return float(first.begin[low]) - ledger.t0, float(first.end[high]) - ledger.t0


def _draw(axes: Axes, record: RunRecord, ledger: Ledger, start: float, seconds: float) -> set[int]:
    """One run's lanes from `start` on; the causes that were seen."""
    from matplotlib.patches import Rectangle

    palette, steps, seen = light_palette(), {step.step: step for step in record.steps}, set()
    unit = 1e3 if seconds < 1 else 1.0
    width = seconds * unit
    inch = width / (WIDTH - 0.6)

    def box(x0: float, x1: float, y: float, height: float, **style: object) -> float:
        """Clipped to the window; its width."""
        x0, x1 = max(0.0, x0), min(width, x1)
        if x1 > x0:
            axes.add_patch(Rectangle((x0, y), x1 - x0, height, **style))  # type: ignore[arg-type]
        return x1 - x0

    def text(x0: float, x1: float, y: float, words: str, colour: str) -> None:
        x0, x1 = max(0.0, x0), min(width, x1)
        if x1 - x0 > LETTER * inch * len(words):
            axes.text((x0 + x1) / 2, y, words, ha="center", va="center", color=colour, fontsize=FONT - 1.2)

    for stage, (lane, idle) in enumerate(zip(ledger.lanes, ledger.columns, strict=True)):
        y = ledger.num_stages - 1 - stage
        for x0, x1, code in _visible(idle.start, idle.end, idle.cause, ledger.t0 + start, seconds, unit):
            colour = palette[css_name(CAUSES[code])]
            if box(x0, x1, y + 0.06, 0.88, facecolor=colour, hatch="/////", edgecolor="white", linewidth=0) > 0:
                seen.add(code)
                text(x0, x1, y + 0.5, short_label(CAUSES[code]), "black")
        for x0, x1, number in _visible(lane.begin, lane.end, lane.step, ledger.t0 + start, seconds, unit):
            step = steps.get(number)
            cut = _decode_share(step)
            box(x0, x1, y + 0.06, 0.88 * cut, facecolor=palette["decode"], linewidth=0)
            box(x0, x1, y + 0.06 + 0.88 * cut, 0.88 * (1 - cut), facecolor=palette["chunk"], linewidth=0)
            box(x0, x1, y + 0.06, 0.88, facecolor="none", edgecolor="white", linewidth=0.5)
            if step is not None:
                text(x0, x1, y + 0.5, _made_of(step), "white" if cut < 0.5 else palette["on-decode"])
    axes.set_xlim(0, width)
    axes.set_ylim(0, ledger.num_stages)
    axes.set_yticks([s + 0.5 for s in range(ledger.num_stages)])
    axes.set_yticklabels([f"stage {s}" for s in reversed(range(ledger.num_stages))])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return seen


def _visible(
    start: np.ndarray, end: np.ndarray, what: np.ndarray, origin: float, seconds: float, unit: float
) -> list[tuple[float, float, int]]:
    kept = np.flatnonzero((end > origin) & (start < origin + seconds))
    times = (((side[kept] - origin) * unit).tolist() for side in (start, end))
    return list(zip(*times, what[kept].tolist(), strict=True))


def _decode_share(step: StepRecord | None) -> float:
    """Of the box, for decodes: their share of the tokens, but enough to be seen beside a chunk."""
    if step is None or not step.num_tokens:
        return 0.0
    share = step.decode_tokens / step.num_tokens
    return share if share in (0.0, 1.0) else min(0.85, max(0.15, share))


def _made_of(step: StepRecord) -> str:
    parts = [str(step.prefill_tokens)] if step.prefill_tokens else []
    parts += [f"{step.decode_tokens}d"] if step.decode_tokens else []
    return "+".join(parts)


def _legend(codes: Sequence[int]) -> list[object]:
    from matplotlib.patches import Patch

    palette = light_palette()
    handles: list[object] = [Patch(facecolor=palette[kind], label=f"{kind} tokens") for kind in ("chunk", "decode")]
    for code in codes:
        colour = palette[css_name(CAUSES[code])]
        handles.append(Patch(facecolor=colour, hatch="/////", edgecolor="white", label=label(CAUSES[code])))
    return handles
