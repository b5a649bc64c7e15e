"""Results: a page and its numbers as JSON for each benchmark that has some."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.results import write_json

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PAGES = sorted(path.stem for path in RESULTS.glob("*.md"))


def check(result: dict[str, Any]) -> None:
    """Check what a result file holds, written by a command or kept beside its page."""
    assert set(result) == {"benchmark", "command", "measurements"}
    assert result["command"].startswith(f"python -m benchmarks.{result['benchmark']}")
    assert importlib.util.find_spec(f"benchmarks.{result['benchmark']}") is not None
    for measurement in result["measurements"]:
        assert set(measurement) == {"commit", "date", "machine", "tables"}
        for rows in measurement["tables"].values():
            assert rows
            assert all(set(row) == set(rows[0]) for row in rows)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_stands_beside_its_numbers(name: str) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    check(result)
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# `{result['command']}`\n")
    assert f"({name}.json)" in page
    for measurement in result["measurements"]:
        assert f"`{measurement['commit']}`" in page
        assert measurement["date"] in page


def test_numbers_have_their_page() -> None:
    assert sorted(path.stem for path in RESULTS.glob("*.json")) == PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_json_holds_what_the_page_prints(name: str) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    rows = [row for one in result["measurements"] for table in one["tables"].values() for row in table]
    numbers = [abs(value) for row in rows for value in row.values() if isinstance(value, int | float)]
    labels = {value for row in rows for value in row.values() if isinstance(value, str)}
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    text = "".join(re.findall(r"^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    for label in sorted(labels, key=len, reverse=True):
        text = text.replace(label, "")
    printed = re.findall(r"(\d[\d,]*\.\d+)( s|%)?", text)
    assert len(printed) >= 16
    for number, unit in printed:
        if name == "long_prompts" and not unit:  # quotients of two times
            continue
        value, scale = float(number.replace(",", "")), 100 if unit == "%" else 1
        half = 0.501 * 10 ** -len(number.partition(".")[2])
        assert any(abs(held * scale - value) <= half for held in numbers), number + unit


def test_a_command_writes_its_numbers(tmp_path: Path) -> None:
    write_json(tmp_path / "speed.json", "speed", {"runs": [{"policy": "sarathi", "median_s": 1.5}]})
    result = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    check(result)
    assert result["measurements"][0]["tables"] == {"runs": [{"policy": "sarathi", "median_s": 1.5}]}
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?|unknown", result["measurements"][0]["commit"])
