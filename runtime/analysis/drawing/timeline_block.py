"""The pipeline timeline as a block of a page: the section with its legend, and the scripts that draw it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from ..ledger.causes import CAUSES, Cause
from .formatting import cause_label, css_name, short_cause_label
from .page_parts import HATCHES, fill, idle_swatch, script_json, swatch, template
from .timeline_columns import TimelineColumns


def timeline_section(heading: str, seconds: Mapping[Cause, float], hint: str = "") -> str:
    """Render the section: its heading, the legend, the empty canvas, and how to use it.

    Args:
        heading: The section's heading.
        seconds: Idle seconds by cause; the legend lists the causes with idle time.
        hint: What the timeline shows, in a sentence.
    """
    return fill(
        template("timeline.html"),
        {"heading": html.escape(heading), "legend": _legend(seconds), "hint": html.escape(hint)},
    )


def timeline_scripts(
    tick: float, columns: Sequence[TimelineColumns], heads: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Render the scripts for the end of the page: the data of each run, and the drawing code.

    Args:
        tick: Length of a tick, in seconds.
        columns: The packed columns of each run.
        heads: Text next to each run in the timeline; None: one run, without a heading.
    """
    runs = [{**one.head, **head} for one, head in zip(columns, heads or [{}], strict=True)]
    head = {"tick": tick, "span": max(one.end for one in columns), "causes": causes_head(), "runs": runs}
    data = "\n".join(
        f'<script type="text/plain" id="columns{place}">{one.data}</script>' for place, one in enumerate(columns)
    )
    drawing = "\n".join(map(template, ("timeline_columns.js", "timeline_style.js", "timeline.js")))
    return (
        f'<script type="application/json" id="head">{script_json(head)}</script>\n{data}\n'
        f"<script>\n{drawing}\n</script>"
    )


def causes_head() -> list[dict[str, str]]:
    """Return the cause entries of the script's head, in the order of the causes' codes."""
    return [
        {
            "name": cause_label(cause),
            "short": short_cause_label(cause),
            "css": css_name(cause),
            "hatch": HATCHES[cause],
            "meaning": cause.meaning,
        }
        for cause in CAUSES
    ]


def _legend(seconds: Mapping[Cause, float]) -> str:
    """Render the legend: chunk tokens, decode tokens, and each cause with idle time."""
    items = [
        f'<li title="Prompt tokens.">{swatch("chunk")}chunk tokens</li>',
        f'<li title="One token of one request each.">{swatch("decode")}decode tokens</li>',
    ]
    items += [
        f'<li title="{html.escape(cause.meaning)}">{idle_swatch(cause)}{html.escape(cause_label(cause))}</li>'
        for cause in CAUSES
        if seconds[cause] > 0
    ]
    return "\n".join(items)
