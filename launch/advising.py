"""Advice on a run that has just ended, or that was explained before: from `explain.json` in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..conf.errors import ConfigError

if TYPE_CHECKING:
    from ..runtime.ledger.advice import Advice
    from ..runtime.run_folder.read import RunFolder

_SECONDS = 2.0  # of replays, at most
_LEAST_S = 0.5  # less finds nothing


def quick_advice(folder: RunFolder, *, share: float = 0.1) -> list[Advice] | None:
    """Replay a run with the likeliest changes for a short time, and keep what they would do in its folder.

    Args:
        share: of the run's own time that this may take, up to `_SECONDS`.

    Returns:
        The changes worth making; None where the run is too short or cannot be replayed.
    """
    seconds = min(_SECONDS, share * _duration(folder.summary))
    if seconds < _LEAST_S:
        return None
    from ..runtime.explain.explanation import quick_explanation
    from ..runtime.run_folder.explain_json import write_explanation
    from .run_command import command_writer

    explanation = quick_explanation(folder, seconds=seconds, command_of=command_writer(folder))
    if explanation is None or not explanation.outcomes:  # of few changes, none of which helps, there is nothing to say
        return None
    write_explanation(folder.path, explanation)
    return explanation.foremost


def kept_advice(path: Path) -> list[Advice] | None:
    """The changes worth making by the explanation in a run folder; None without one, or where it is damaged."""
    from ..runtime.run_folder.explain_json import read_explanation

    try:
        explanation = read_explanation(path)
    except ConfigError:
        return None
    return None if explanation is None else explanation.foremost


def _duration(summary: Mapping[str, Any]) -> float:
    return float(summary.get("duration", 0.0))
