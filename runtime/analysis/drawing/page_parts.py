"""The parts that the pages have in common: the shell, samples of colours, and tables of pairs."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from ..cost.error import CostError
from ..ledger.causes import Cause
from .formatting import css_name

# What the shares of idle time are called, the same on every page; docs/ledger.md has the definitions.
IDLE_WORDS = (
    '<p class="hint">Idle: share of all stage time without compute. Bubbles: the part of it that is not starved, '
    "unknown, recovery, fill or drain, over the same stage time (docs/ledger.md#idle-and-bubbles).</p>"
)

# The hatch of each cause, by its class in the style sheet. Causes that follow each other differ in it, and causes with
# the same hatch differ in being grey or not.
HATCHES = {
    Cause.PB1_PREFILL_SIZE: "slash",
    Cause.PB2_PREFILL_DECODE: "backslash",
    Cause.PB3_DECODE_CONTEXT: "upright",
    Cause.STAGE_IMBALANCE: "cross",
    Cause.TRANSPORT: "level",
    Cause.CONTROL: "dots",
    Cause.CONTENTION: "cross",
    Cause.STARVED_NO_REQUEST: "slash",
    Cause.STARVED_IN_FLIGHT: "backslash",
    Cause.STARVED_KV_FULL: "cross",
    Cause.UNKNOWN: "dots",
    Cause.RECOVERY: "upright",
    Cause.FILL_DRAIN: "level",
}


def template(name: str, package: str = __package__) -> str:
    """Read a template file of a package; by default of this one."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


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
        {"title": values["title"], "style": template("page.css") + style, "body": fill(body, values)},
    )


def script_json(value: Any) -> str:
    """Write JSON that can stand inside a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def swatch(name: str) -> str:
    """Render a sample of a colour of the style sheet."""
    return f'<i class="swatch" style="background:var(--{name})"></i>'


def idle_swatch(cause: Cause) -> str:
    """Render a sample of a cause's colour, hatched as in the timeline."""
    return f'<i class="swatch {HATCHES[cause]}" style="background-color:var(--{css_name(cause)})"></i>'


def words_section(words: Sequence[str]) -> str:
    """Render sentences as the first paragraph of a page; empty if there are none."""
    if not words:
        return ""
    first, *rest = [html.escape(sentence) for sentence in words]
    more = f"<p>{' '.join(rest)}</p>" if rest else ""
    return f'<section class="verdict"><p><b>{first}</b></p>{more}</section>\n'


def notes_list(notes: Iterable[str]) -> str:
    """Render the scheduler's notes as a list; empty if there are none."""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def error_notes(summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say how far the stage times of simulated runs may be off, each thing that there is to say once."""
    errors = (summary.get("cost_error") for summary in summaries)
    texts = (CostError(**error).text for error in errors if error)
    return list(dict.fromkeys(text[:1].upper() + text[1:] + "." for text in texts))


def row(head: str, cells: Iterable[str], css: str = "") -> str:
    """Render a row of a table from HTML: its head, and its cells."""
    tag = f'<tr class="{css}">' if css else "<tr>"
    return f"{tag}<th>{head}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def table(heads: Iterable[str], rows: Iterable[str], css: str = "", style: str = "") -> str:
    """Render a table from HTML: what its columns are, and whole rows."""
    attributes = (f' class="{css}"' if css else "") + (f' style="{style}"' if style else "")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table{attributes}><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def pairs_table(values: Mapping[str, Any]) -> str:
    """Render names and values as a table."""
    rows = "".join(row(html.escape(str(k)), [html.escape(str(v))]) for k, v in values.items())
    return f"<table>{rows}</table>" if rows else '<p class="none">not recorded</p>'
