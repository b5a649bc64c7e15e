"""The parts that all pages share: the shell, colour samples, and tables of names and values."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from ...simulation.cost.error import CostError
from ..ledger.causes import Cause
from .formatting import css_name

# Names of the shares of idle time, the same on every page; docs/ledger.md has the definitions.
IDLE_WORDS = (
    '<p class="hint">Idle: share of all stage time without compute. Bubbles: the part of it that is not starved, '
    "unknown, recovery, fill or drain, over the same stage time (docs/ledger.md#idle-and-bubbles).</p>"
)

# The hatch of each cause, by its class in the style sheet. Adjacent causes have different hatches; of two causes with
# the same hatch, only one is grey.
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
    """Read a template file of a package, by default this one."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace each `{{name}}` by its value. Values are not expanded again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], text)


def whole_page(body: str, values: Mapping[str, str], style: str = "") -> str:
    """Render a self-contained page.

    Args:
        body: Template of the page's body.
        values: Values of the template's names; must contain `title`.
        style: Style sheet of this page, added to the common one.
    """
    return fill(
        template("shell.html"),
        {"title": values["title"], "style": template("page.css") + style, "body": fill(body, values)},
    )


def script_json(value: Any) -> str:
    """Serialize JSON for embedding in a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def swatch(name: str) -> str:
    """Render a sample of a colour of the style sheet."""
    return f'<i class="swatch" style="background:var(--{name})"></i>'


def idle_swatch(cause: Cause) -> str:
    """Render a sample of a cause's colour, hatched as in the timeline."""
    return f'<i class="swatch {HATCHES[cause]}" style="background-color:var(--{css_name(cause)})"></i>'


def cards(numbers: Iterable[Sequence[str]]) -> str:
    """Render main numbers as cards, each with its name, value, unit and a note."""
    return "\n".join(
        f'<div class="card"><h3>{name}</h3><p class="value">{value} <small>{unit}</small></p><p>{note}</p></div>'
        for name, value, unit, note in (map(html.escape, each) for each in numbers)
    )


def section(heading: str, body: str, hint: str = "", name: str = "") -> str:
    """Render a section of a page from the HTML of its body and of a hint above it; empty if it has no body."""
    if not body:
        return ""
    named = f' id="{name}"' if name else ""
    above = f'  <p class="hint">{hint}</p>\n' if hint else ""
    return f"<section{named}>\n  <h2>{heading}</h2>\n{above}{body}\n</section>\n\n"


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
    """Return notes on the prediction error of simulated stage times, without duplicates."""
    errors = (summary.get("cost_error") for summary in summaries)
    texts = (CostError(**error).text for error in errors if error)
    return list(dict.fromkeys(text[:1].upper() + text[1:] + "." for text in texts))


def row(head: str, cells: Iterable[str], css: str = "") -> str:
    """Render a table row from the HTML of its header cell and its cells."""
    tag = f'<tr class="{css}">' if css else "<tr>"
    return f"{tag}<th>{head}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def table(heads: Iterable[str], rows: Iterable[str], css: str = "", style: str = "") -> str:
    """Render a table from the HTML of its column headers and of its rows."""
    attributes = (f' class="{css}"' if css else "") + (f' style="{style}"' if style else "")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table{attributes}><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def pairs_table(values: Mapping[str, Any]) -> str:
    """Render names and values as a table."""
    rows = "".join(row(html.escape(str(k)), [html.escape(str(v))]) for k, v in values.items())
    return f"<table>{rows}</table>" if rows else '<p class="none">not recorded</p>'
