"""A table of text on consoles of several widths, and on a page."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gapless.runtime.analysis.drawing.text_table import TextTable

TABLE = TextTable(
    ("", "BASE", "RUN", "stage 0", "why [it] is so"),
    [
        ("all <of> it", "12.34 s", "1.23 s", "4.56 s", "as one long reason"),
        ("a part", "", "1.11 s", "", ""),
        ("sum", "1", "2", "3", ""),
    ],
    "A title",
    ("", "why [it] is so"),
    ("BASE", "stage 0"),
    kinds={1: "member", 2: "total"},
)


def printed(width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(TABLE)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("width", "left_out"), [(90, set()), (58, {"stage", "4.56"}), (46, {"stage", "4.56", "BASE", "12.34"})]
)
def test_a_narrow_terminal_leaves_out_optional_columns_and_cuts_nothing(width: int, left_out: set[str]) -> None:
    text, wide = printed(width), printed(200)
    assert max(map(len, text.splitlines())) <= width
    assert {word for word in ("BASE", "RUN", "stage", "12.34", "1.23", "4.56") if word not in text} == left_out
    assert "why [it] is so" in wide
    assert "│   a part " in wide


def test_a_page_has_every_column_and_the_title_over_the_first() -> None:
    page = TABLE.html("narrow")
    assert page.startswith('<div class="scroll"><table class="narrow"><thead><tr><th>A title</th><th>BASE</th>')
    assert '<th class="text">why [it] is so</th>' in page
    assert "<tr><th>all &lt;of&gt; it</th><td>12.34 s</td>" in page
    assert '<tr class="member"><th>a part</th><td></td>' in page
    assert page.count('class="total"') == 1
