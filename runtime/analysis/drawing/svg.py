"""Renders charts as page figures: a legend and SVG, with the colours of the style sheet."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from .chart import Chart
from .layout import WIDTH, Box, Dots, Layout, Line, Places, Shape, Text
from .page_parts import swatch

_DOT_RADIUS = 4


def figures(charts: Sequence[Chart]) -> str:
    """Render charts side by side, wrapped to the width of the page."""
    return f'<div class="figures">{"".join(figure(chart) for chart in charts)}</div>'


def figure(chart: Chart) -> str:
    """Render a chart as a `figure` element: well-formed XML without external references, with titles on hover."""
    heading = f"<figcaption>{html.escape(chart.title)}</figcaption>"
    if chart.is_empty:
        return f'<figure>{heading}<ul class="key"></ul><p class="none">nothing measured</p></figure>'
    layout = Layout(chart)
    key = "".join(f"<li>{swatch(entry.colour)}{html.escape(entry.label)}</li>" for entry in layout.legend)
    label = f"{chart.title}: {chart.y.text} over {chart.x.text}"
    note = f'<p class="note">{html.escape(chart.note)}</p>'  # even if empty: figures side by side align part by part
    drawing = svg(WIDTH, layout.height, label, layout.shapes())
    return f'<figure>{heading}<ul class="key">{key}</ul>{drawing}{note}</figure>'


def svg(width: float, height: float, label: str, shapes: Iterable[Shape], css: str = "chart") -> str:
    """Render shapes as an `svg` element of class `css` with `label` as its accessible name."""
    return (
        f'<svg class="{css}" viewBox="0 0 {_n(width)} {_n(height)}" role="img" '
        f'aria-label="{html.escape(label, quote=True)}">{"".join(map(_element, shapes))}</svg>'
    )


def _element(shape: Shape) -> str:
    match shape:
        case Text(x, y, text, anchor, css):
            where = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"'
            return f"<text {where}{_class(css)}>{html.escape(text)}</text>"
        case Box():
            style = _style(fill=shape.colour)
            size = f'width="{_n(shape.width)}" height="{_n(shape.height)}"'
            return _titled("rect", f'x="{_n(shape.x)}" y="{_n(shape.y)}" {size}{_class(shape.css)}{style}', shape.title)
        case Line():
            path = "".join(map(_path, shape.parts)) + ("" if shape.css else "Z")
            dash = f' stroke-dasharray="{shape.dash}"' if shape.dash else ""
            style = _style(stroke=shape.stroke, fill=shape.fill, opacity=shape.opacity)
            return _titled("path", f'{_class(shape.css)}{style}{dash} d="{path}"', shape.title)
        case Dots(places, colour, title) if title:
            circles = (f'cx="{_n(x)}" cy="{_n(y)}" r="{_DOT_RADIUS}"{_style(fill=colour)}' for x, y in places)
            return "".join(_titled("circle", circle, title) for circle in circles)
        case Dots(places, colour):
            path = "".join(f"M{_n(x)},{_n(y)}h0" for x, y in places)
            return _titled("path", f'class="dots"{_style(stroke=colour)} d="{path}"', "")


def _titled(name: str, attributes: str, title: str) -> str:
    inside = f"<title>{html.escape(title)}</title>" if title else ""
    return f"<{name} {attributes.strip()}>{inside}</{name}>" if inside else f"<{name} {attributes.strip()}/>"


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""


def _style(*, stroke: str = "", fill: str = "", opacity: float = 1.0) -> str:
    colours = [f"{name}:var(--{colour})" for name, colour in (("stroke", stroke), ("fill", fill)) if colour]
    colours += [f"fill-opacity:{opacity:.2g}".replace("0.", ".")] if fill and opacity < 1.0 else []
    return f' style="{";".join(colours)}"' if colours else ""


def _path(places: Places) -> str:
    """Return the SVG path through points; horizontal and vertical segments take one number each."""
    path: list[str] = []
    last_x = last_y = ""
    for across, up in places:
        x, y = _n(across), _n(up)
        if not path:
            path.append(f"M{x},{y}")
        elif y == last_y:
            path.append(f"H{x}" if x != last_x else "")
        else:
            path.append(f"V{y}" if x == last_x else f"L{x},{y}")
        last_x, last_y = x, y
    return "".join(path)


def _n(value: float) -> str:
    """Format a coordinate with one decimal, or none if it is whole."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text
