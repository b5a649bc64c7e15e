"""Faults and stragglers of a run: lines for the terminal, sections of its page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.numbers import counted, seconds_text
from ..drawing.page_parts import section
from ..drawing.text_table import TextTable

_MAX_LINES = 10  # of faults or stragglers on a terminal
_LEAST_REST = 1e-3  # least time of a repair outside its parts to be shown, in seconds
_FAULTS_HINT = (
    "A fault lasts from the last sign of progress until all stages ran again. Unfinished requests then begin again "
    "with the tokens that they had: <i>replay</i> is the time that a stage computed these again, in the mean of all "
    "stages."
)
_STRAGGLERS_HINT = (
    "A stage that computed slowly for a while, measured by the other stages and by what it takes for micro-batches of "
    "that kind in the rest of the run."
)


def fault_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return one line per fault of the run's pipeline: when and why, the recovery time, and what was recomputed.

    The first `_MAX_LINES` have a line each, all others share one.
    """
    lines, faults = [], summary.get("faults", [])
    for fault in faults[:_MAX_LINES]:
        again = f"{counted(fault['requests'], 'request')} and {counted(fault['tokens'], 'token')} computed again"
        if fault["replay"]:
            again += f" in {seconds_text(fault['replay'])}"
        of = f" of replica {fault['replica']}" if "replica" in fault else ""
        what = f"({fault['reason']}): {fault['text']}; {_ended(fault, 'not recovered', 'recovered in ')}"
        lines.append(f"fault{of} at {fault['time']:,.2f} s {what}, {again}")
    if len(faults) > _MAX_LINES:
        seconds = seconds_text(summary["recovery_seconds"])
        lines.append(f"and {len(faults) - _MAX_LINES:,} more; all faults together lasted {seconds}")
    return lines


def faults_section(faults: Sequence[Mapping[str, Any]]) -> str:
    """Render the section; empty if there was no fault.

    Args:
        faults: Entries of `summary.json`. If they are of several runs, each has its run's name as `run`.
    """
    if not faults:
        return ""
    runs = ("run",) if "run" in faults[0] else ()
    heads = (
        *(*runs, "time", "reason", "fault", "ranks started again", "requests again", "tokens again"),
        *("until it had recovered", "of that", "replay"),
    )
    rows = [
        (
            *(fault[run] for run in runs),
            f"{fault['time']:,.3f} s",
            fault["reason"],
            fault["text"],
            ", ".join(map(str, fault["ranks"])) or "-",
            f"{fault['requests']:,}",
            f"{fault['tokens']:,}",
            _ended(fault, "never", ""),
            _parts(fault),
            "-" if fault["replay"] is None else seconds_text(fault["replay"]),
        )
        for fault in faults
    ]
    shown = TextTable(heads, rows, left=("of that",))
    return section("Faults", shown.html(), _FAULTS_HINT)


def straggler_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return one line per straggler period for the first `_MAX_LINES`, and one for all others."""
    stragglers = summary.get("stragglers", [])
    lines = [
        f"stage {each['stage']} computed {each['slowdown']:.1f} times as long as usual from {each['start']:,.2f} s to "
        f"{each['end']:,.2f} s; the others waited {seconds_text(each['waited'])} for it"
        for each in stragglers[:_MAX_LINES]
    ]
    if len(stragglers) > _MAX_LINES:
        waited = seconds_text(sum(each["waited"] for each in stragglers[_MAX_LINES:]))
        lines.append(f"and {len(stragglers) - _MAX_LINES:,} more times, for which others waited {waited}")
    return lines


def stragglers_section(summary: Mapping[str, Any]) -> str:
    """Render the periods in which a stage was slow; empty if there were none."""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in straggler_lines(summary))
    return section("Stragglers", lines and f"<ul>{lines}</ul>", _STRAGGLERS_HINT)


def _ended(fault: Mapping[str, Any], never: str, recovered: str) -> str:
    """Say how long the recovery took; a fault whose only part is its detection met the next one."""
    if fault["seconds"] is None:
        return never
    seconds = seconds_text(fault["seconds"])
    if fault["parts"].keys() == {"detect"}:
        return f"the next fault came after {seconds}"
    left = fault.get("stages")
    return f"{recovered}{seconds}" + ("" if left is None else f" with {counted(left, 'stage')} from then on")


def _parts(fault: Mapping[str, Any]) -> str:
    """Format the seconds of each part, and the time between them."""
    parts: dict[str, float] = {name: max(0.0, seconds) for name, seconds in fault["parts"].items()}
    rest = (fault["seconds"] or 0.0) - sum(parts.values())
    parts |= {"rest": rest} if rest > _LEAST_REST else {}
    return ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items())
