"""The parts that the pages have in common: the shell, legends, and tables of pairs."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from ..ledger.causes import CAUSES, Cause
from .formatting import cause_label, css_name, short_cause_label

# What the shares of idle time are called, the same on every page; docs/ledger.md has the definitions.
IDLE_WORDS = (
    '<p class="hint">Idle: share of all stage time without compute. Bubbles: the part of it that is not starved, fill '
    "or drain, over the same stage time (docs/ledger.md#idle-and-bubbles).</p>"
)


def template(name: str) -> str:
    """Read a template file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace each `{{name}}` by its value. A `{{name}}` inside a value stays as it is."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], text)


def whole_page(body: str, values: Mapping[str, str], style: str = "") -> str:
    """Render a page that needs no other file.

    Args:
        body: Template of the page's body.
        values: What the template's names stand for; `title` must be one of them.
        style: Style sheet of this page, added to the one that all pages have.
    """
    return fill(
        template("shell.html"),
        {"title": values["title"], "style": template("report.css") + style, "body": fill(body, values)},
    )


def script_json(value: Any) -> str:
    """Write JSON that can stand inside a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def causes_head() -> list[dict[str, str]]:
    """Return what the timeline's script shows of each cause, in the order of the causes' codes."""
    return [
        {
            "name": cause_label(cause),
            "short": short_cause_label(cause),
            "css": css_name(cause),
            "meaning": cause.meaning,
        }
        for cause in CAUSES
    ]


def swatch(name: str) -> str:
    """Render a sample of a colour of the style sheet."""
    return f'<i class="swatch" style="background:var(--{name})"></i>'


def idle_swatch(cause: Cause) -> str:
    """Render a sample of a cause's colour, hatched as in the timeline."""
    return f'<i class="swatch idle" style="background-color:var(--{css_name(cause)})"></i>'


def legend(seconds: Mapping[Cause, float]) -> str:
    """Render the timeline's legend: chunk tokens, decode tokens, and each cause that has idle seconds."""
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


def notes_list(notes: Iterable[str]) -> str:
    """Render the scheduler's notes as a list; empty if there are none."""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def pairs_table(values: Mapping[str, Any]) -> str:
    """Render names and values as a table."""
    rows = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in values.items())
    return f"<table>{rows}</table>" if rows else '<p class="none">not recorded</p>'
