"""What the page of one run and that of a comparison are put together from."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from ..ledger.ledger import CAUSES, Cause
from .formatting import cause_label, css_name, short_cause_label


def template(name: str) -> str:
    """A template file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace each `{{name}}` once; what is filled in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], text)


def whole_page(body: str, values: Mapping[str, str], style: str = "") -> str:
    """A page that stands alone: `body`, a template, filled with `values` (its `title` among them), in the shell that
    all pages have; `style` is added to theirs."""
    return fill(
        template("shell.html"),
        {"title": values["title"], "style": template("report.css") + style, "body": fill(body, values)},
    )


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def causes_head() -> list[dict[str, str]]:
    """What the timeline's script knows of the causes, by their codes."""
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
    return f'<i class="swatch" style="background:var(--{name})"></i>'


def idle_swatch(cause: Cause) -> str:
    """Hatched, as idle time is in the timeline."""
    return f'<i class="swatch idle" style="background-color:var(--{css_name(cause)})"></i>'


def legend(seconds: Mapping[Cause, float]) -> str:
    """List items: what boxes hold, and the causes of which there are seconds."""
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
    """What a scheduler noted, or nothing."""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def pairs_table(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>" for k, v in values.items())
    return f"<table>{rows}</table>" if rows else '<p class="none">not recorded</p>'
