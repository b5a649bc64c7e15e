"""Each picture that a document shows has a scene of `make pictures` that makes it, and each file is shown."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.paper import EXPERIMENTS
from benchmarks.pictures import MADE
from benchmarks.support.results import ROOT

SHOWN = re.compile(r"!\[[^\]]*\]\(([^)\s]+\.(?:png|svg|jpe?g|gif|webp))\)")


def shown() -> set[Path]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    return {
        (page.parent / link).resolve() for page in pages for link in SHOWN.findall(page.read_text(encoding="utf-8"))
    }


def test_each_picture_shown_is_made_by_a_scene() -> None:
    made = [name for names in MADE.values() for name in names]
    assert len(made) == len({*made})
    pictures = {path.stem for path in shown()}
    paper = {name for name in pictures if name.startswith("paper_")}
    assert pictures - paper == {*made}
    assert {name for name in paper if re.match(rf"paper_({'|'.join(EXPERIMENTS)})", name)} == paper


def test_each_picture_is_there_and_shown() -> None:
    assert shown() == {*(ROOT / "docs/images").iterdir()}
