"""Finds advice on a run that has just ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.explain.analysed_run import AnalysedRun
    from ..runtime.explain.explanation import Explanation

_SECONDS = 2.0  # of replays, at most
_LEAST_S = 0.5  # of replays; in less time none finds anything


def quick_advice(run: AnalysedRun, *, share: float = 0.1) -> Explanation | None:
    """Replay a run for a short time with the changes that are most likely to help.

    Args:
        run: a run that stands alone, not one of a comparison.
        share: of the run's own time that this may take, up to `_SECONDS`.

    Returns:
        What these changes would do. None if the run is too short or cannot be replayed, or if no change saves time.
    """
    seconds = min(_SECONDS, share * run.fleet.duration)
    if seconds < _LEAST_S:
        return None
    from ..runtime.explain.explain_run import quick_explanation
    from .run_command import command_writer

    command_of = command_writer(run.info.config)
    explanation = quick_explanation(run, seconds=seconds, command_of=command_of)
    return explanation
