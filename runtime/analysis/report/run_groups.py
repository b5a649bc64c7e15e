"""Groups runs that repeat a setting, and labels each group by how its setting differs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ....conf.build import leaves
from ..run_folder.read import RunFolder

# Top-level keys that do not affect a run itself: where its outputs go, and what else a benchmark runs.
_KEYS_WITHOUT_EFFECT = frozenset({"outputs", "print_texts", "policies", "repeats", "interleave", "warmup", "slo"})
# Sections with a `name`. Their other keys are only compared between settings with the same name in the section.
_NAMED_SECTIONS = ("model", "hardware", "cluster", "scheduler", "workload")
_COST_CONSTANTS = "hardware.costs."  # prefix of the analytic cost model's constants
_MANY_CONSTANTS = 3  # least number of differing constants for which a label shows one number instead
_LONGEST_NAMED = 32  # longest label that is appended to the name of its folder, in characters
_MISSING = object()


@dataclass(frozen=True, slots=True)
class RunGroup:
    """The runs of one setting, at least one. A comparison has one row or column per group."""

    label: str
    runs: Sequence[RunFolder]

    def __post_init__(self) -> None:
        assert self.runs, self.label

    @property
    def median_run(self) -> RunFolder:
        """The run with the median output throughput, which charts show; the slower of two middle ones."""
        ranked = sorted(self.runs, key=lambda run: float(run.summary.get("output_throughput") or 0.0))
        return ranked[(len(ranked) - 1) // 2]


def group_runs(folders: Sequence[RunFolder], names: Mapping[Path, str] = MappingProxyType({})) -> list[RunGroup]:
    """Group runs of equal configs, in the order of each group's first run.

    A label is unique and shows only what differs between the settings, as in `sarathi chunk=256`.

    Args:
        folders: The runs.
        names: Names of run folders by path. A named run is a group of its own, with the name in its label.
    """
    by_setting: dict[tuple[str, str], list[RunFolder]] = {}
    for folder in folders:
        setting = json.dumps(settings(folder.config), sort_keys=True, default=str)
        by_setting.setdefault((names.get(folder.path, ""), setting), []).append(folder)
    repeats = list(by_setting.values())
    points = _fold_constants([settings(runs[0].config) for runs in repeats])
    labels = _labels(points, [runs[0].title for runs in repeats], [name for name, _ in by_setting])
    return [RunGroup(label, runs) for label, runs in zip(labels, repeats, strict=True)]


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a config to dotted keys and values, without the keys that do not affect the run."""
    return dict(leaves({key: value for key, value in config.items() if key not in _KEYS_WITHOUT_EFFECT}))


def differing_keys(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the dotted keys whose values differ between settings, in their order.

    A key of a named section, such as `scheduler.chunk`, counts only if its values differ between settings with the same
    name in that section.
    """
    keys = dict.fromkeys(key for point in points for key in point)
    return [key for key in keys if any(len(values) > 1 for values in _values_by_name(points, key).values())]


def _values_by_name(points: Sequence[Mapping[str, Any]], key: str) -> dict[str, set[str]]:
    """Return the values of `key`, as JSON, by the name in its section; by "" for keys outside named sections."""
    section = key.partition(".")[0]
    found: dict[str, set[str]] = {}
    for point in points:
        name = str(point.get(f"{section}.name")) if _depends_on_name(key) else ""
        value = point.get(key, _MISSING)
        if value is not _MISSING:
            found.setdefault(name, set()).add(json.dumps(value, sort_keys=True, default=str))
    return found


def _depends_on_name(key: str) -> bool:
    """Return whether `key` is in a named section and is not the name itself."""
    section = key.partition(".")[0]
    return section in _NAMED_SECTIONS and key != f"{section}.name"


def _fold_constants(points: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Replace many differing constants of the cost model by one number per fit, so that labels stay short."""
    keys = [key for key in differing_keys(points) if key.startswith(_COST_CONSTANTS)]
    if len(keys) < _MANY_CONSTANTS:
        return points
    fits = [json.dumps([point.get(key) for key in keys]) for point in points]
    distinct = list(dict.fromkeys(fits))
    return [
        {key: value for key, value in point.items() if key not in keys}
        | {_COST_CONSTANTS.removesuffix("."): distinct.index(fit) + 1}
        for point, fit in zip(points, fits, strict=True)
    ]


def _labels(points: Sequence[Mapping[str, Any]], titles: Sequence[str], names: Sequence[str]) -> list[str]:
    """Label each setting by its name and the keys that differ; by its title if it has neither."""
    keys = differing_keys(points)
    if not keys:
        keys = ["scheduler.name"]
    # A policy's key reads better after its name, even if all settings have the same policy.
    if len(keys) == 1 and keys[0].startswith("scheduler.") and keys[0] != "scheduler.name":
        keys.insert(0, "scheduler.name")
    keys.sort(key=lambda key: (key != "scheduler.name", not key.startswith("scheduler."), not key.endswith(".name")))
    short_names = [key.rpartition(".")[2] for key in keys]
    labels = []
    for point, title in zip(points, titles, strict=True):
        words = []
        for key, short_name in zip(keys, short_names, strict=True):
            if key not in point:
                continue
            if _depends_on_name(key) and not key.endswith(".name"):
                name = str(point.get(f"{key.partition('.')[0]}.name"))
                if len(_values_by_name(points, key).get(name, ())) < 2:
                    continue
            shown = short_name if short_names.count(short_name) == 1 else key
            words.append(str(point[key]) if key.endswith(".name") else f"{shown}={override_text(point[key])}")
        labels.append(" ".join(words) or title)
    differ = len(set(labels)) > 1
    for place, (name, label) in enumerate(zip(names, labels, strict=True)):
        if name:
            labels[place] = f"{name}: {label}" if differ and len(label) <= _LONGEST_NAMED else name
    return _number_duplicates(labels)


def _number_duplicates(labels: Sequence[str]) -> list[str]:
    """Append ` (2)`, ` (3)`, ... to repeated labels."""
    seen: dict[str, int] = {}
    result = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        result.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return result


def override_text(value: Any) -> str:
    """Format a value as in a command-line override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else json.dumps(value).replace('"', "").replace(" ", "")
