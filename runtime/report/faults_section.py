"""What went wrong on a run's page: a table of faults with how long each part of each repair took, and stragglers."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from ..drawing.formatting import seconds_text
from ..drawing.page_parts import table
from .terminal import met_the_next, stages_left, straggler_lines

_LEAST_REST = 1e-3  # seconds of a repair between its parts, from which on they are named


def faults_section(faults: Sequence[Mapping[str, Any]]) -> str:
    """Render the section; empty if there was no fault.

    Args:
        faults: What `summary.json` holds of each. Those of several runs have the name of theirs as `run`.
    """
    if not faults:
        return ""
    runs = ("run",) if "run" in faults[0] else ()
    heads = (
        *runs,
        "time",
        "reason",
        "fault",
        "ranks started again",
        "requests again",
        "tokens again",
        "until it had recovered",
        "of that",
        "replay",
    )
    rows = (
        f"<tr>{''.join(f'<td>{html.escape(fault[run])}</td>' for run in runs)}"
        f"<td>{fault['time']:,.3f} s</td><td>{html.escape(fault['reason'])}</td>"
        f"<td>{html.escape(fault['text'])}</td>"
        f"<td>{', '.join(map(str, fault['ranks'])) or '-'}</td><td>{fault['requests']:,}</td>"
        f"<td>{fault['tokens']:,}</td><td>{_seconds(fault)}</td>"
        f'<td class="parts">{html.escape(_parts(fault))}</td><td>{_replay(fault)}</td></tr>'
        for fault in faults
    )
    return (
        '<section>\n  <h2>Faults</h2>\n  <p class="hint">A fault lasts from the last sign of progress until all stages '
        "ran again. Unfinished requests then begin again with the tokens that they had: <i>replay</i> is the "
        "time that a stage computed these again, in the mean of all stages.</p>\n"
        f'  <div class="scroll">{table(heads, rows)}</div>\n</section>\n\n'
    )


def stragglers_section(summary: Mapping[str, Any]) -> str:
    """Render the times in which a stage was slow; empty if there was none."""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in straggler_lines(summary))
    if not lines:
        return ""
    return (
        '<section>\n  <h2>Stragglers</h2>\n  <p class="hint">A stage that computed slowly for a while, measured by the '
        "other stages and by what it takes for micro-batches of that kind in the rest of the run.</p>\n"
        f"  <ul>{lines}</ul>\n</section>\n\n"
    )


def _parts(fault: Mapping[str, Any]) -> str:
    """Write the seconds of each part, and what lies between them."""
    parts: dict[str, float] = {name: max(0.0, seconds) for name, seconds in fault["parts"].items()}
    rest = (fault["seconds"] or 0.0) - sum(parts.values())
    parts |= {"rest": rest} if rest > _LEAST_REST else {}
    return ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items())


def _seconds(fault: Mapping[str, Any]) -> str:
    if fault["seconds"] is None:
        return "never"
    seconds = seconds_text(fault["seconds"])
    if met_the_next(fault):
        return f"the next fault came after {seconds}"
    return seconds + ("" if fault.get("stages") is None else f", {stages_left(fault['stages'])}")


def _replay(fault: Mapping[str, Any]) -> str:
    return "-" if fault["replay"] is None else seconds_text(fault["replay"])
