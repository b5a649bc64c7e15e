"""Writes a comparison of settings: a page, its numbers as JSON and CSV, and figures."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.whole_file import whole_file, write_text
from ..run_folder.titles import comparison_title, is_simulated
from .comparison_page import charts_of_settings, draw_runs, render_comparison
from .difference.run_difference import RunDifference
from .metrics import THROUGHPUT, number_keys, ranked, spread
from .run_groups import RunGroup, differing_keys, settings


def write_comparison(
    path: Path,
    groups: Sequence[RunGroup],
    *,
    figures: bool = True,
    title: str | None = None,
    sort: str = THROUGHPUT.key,
) -> tuple[dict[str, Any], RunDifference | None]:
    """Write report.html, comparison.json, comparison.csv and figures/*.png into a folder.

    Numbers are medians over a setting's runs. Ratios are to the first setting. Figures show the median run.

    Args:
        path: The folder; created if needed.
        groups: The settings, each with its runs; at least one.
        figures: Whether PNGs are written.
        title: Heading of the page; None: made from the labels.
        sort: Key of summary.json that ranks the settings.

    Returns:
        The content of comparison.json, and the difference of the settings if they are two.
    """
    assert groups
    path.mkdir(parents=True, exist_ok=True)
    configs = [run.config for group in groups for run in group.runs]
    title = title or comparison_title(configs, [group.label for group in groups])
    drawn = draw_runs(groups, sort)
    difference = RunDifference(groups, drawn.sides) if drawn.sides else None
    comparison = _comparison(groups, title, sort)
    if difference is not None:
        comparison["difference"] = difference.numbers()
    write_text(path / "comparison.json", json.dumps(comparison, indent=2) + "\n")
    with whole_file(path / "comparison.csv") as part, part.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(_csv_rows(comparison))
    page = render_comparison(groups, drawn, title, sort, difference=difference)
    write_text(path / "report.html", page)
    if figures:
        drawn.write(path / "figures", charts_of_settings(groups, sort), simulated=all(map(is_simulated, configs)))
    return comparison, difference


def _comparison(groups: Sequence[RunGroup], title: str, sort: str) -> dict[str, Any]:
    """Return the content of comparison.json.

    `candidates` has one entry per group, in order: the settings that differ, and for each metric the median, min, max,
    the ratio to the first group and the value of each run. `ranking` lists the labels, best first.
    """
    points = [settings(group.runs[0].config) for group in groups]
    differing = differing_keys(points)
    keys = list(dict.fromkeys(key for c in groups for run in c.runs for key in number_keys(run.summary)))
    rows = []
    for group, point in zip(groups, points, strict=True):
        metrics = {}
        for key in keys:
            found = spread(group, key, groups[0])
            if found is not None:
                metrics[key] = {
                    "median": found.median,
                    "min": found.low,
                    "max": found.high,
                    "ratio": found.ratio,
                    "values": list(found.values),
                }
        rows.append(
            {
                "label": group.label,
                "settings": {key: point.get(key) for key in differing},
                "runs": [str(run.path) for run in group.runs],
                "median_run": str(group.median_run.path),
                "metrics": metrics,
            }
        )
    ranking = [group.label for group in ranked(groups, sort)]
    return {"title": title, "sort": sort, "ranking": ranking, "candidates": rows}


def _csv_rows(comparison: dict[str, Any]) -> list[list[Any]]:
    """Return the lines of comparison.csv: the header, then each group's label, number of runs and metrics."""
    rows = comparison["candidates"]
    settings_keys = list(rows[0]["settings"])
    keys = list(dict.fromkeys(key for row in rows for key in row["metrics"]))
    parts = ("median", "min", "max", "ratio")
    names = [key if part == "median" else f"{key}_{part}" for key in keys for part in parts]
    lines: list[list[Any]] = [["label", "runs", *settings_keys, *names]]
    for row in rows:
        values = [row["metrics"].get(key, {}).get(part) for key in keys for part in parts]
        lines.append([row["label"], len(row["runs"]), *row["settings"].values(), *values])
    return lines
