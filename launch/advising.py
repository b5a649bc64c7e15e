"""Quick tuning advice for a run that has just finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.analysis.explain.analysed_run import AnalysedRun
    from ..runtime.analysis.explain.explanation import Explanation

_SECONDS = 2.0  # time limit of replays
_LEAST_S = 0.5  # below it replays find nothing


def quick_advice(run: AnalysedRun, *, share: float = 0.1) -> Explanation | None:
    """Briefly replay a run with the most promising changes.

    Args:
        run: a single run, not part of a comparison.
        share: time limit as a share of the run's duration, up to `_SECONDS`.

    Returns:
        The effects of these changes. None if the run is too short or cannot be replayed, or if no change helps.
    """
    seconds = min(_SECONDS, share * run.fleet.duration)
    if seconds < _LEAST_S:
        return None
    from ..runtime.analysis.explain.explain_run import quick_explanation
    from .run_command import command_writer

    command_of = command_writer(run.info.config)
    explanation = quick_explanation(run, seconds=seconds, command_of=command_of)
    return explanation
