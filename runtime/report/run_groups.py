"""What a comparison compares: a setting, and the runs that repeat it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...conf.build import leaves
from ..run_folder.run_folder import RunFolder

# Keys that say nothing of what a run did: where its outputs went, and what else a benchmark ran beside it.
IGNORED = frozenset({"outputs", "print_texts", "policies", "repeats", "interleave", "warmup", "slo"})
GROUPS = ("model", "hardware", "scheduler", "workload")  # each has a `name`; other keys of it matter within one name
CONSTANTS = "hardware.costs."  # of the analytic cost model
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting under comparison; `runs` are its repeats, at least one."""

    label: str
    runs: Sequence[RunFolder]

    def __post_init__(self) -> None:
        assert self.runs, self.label

    @property
    def median_run(self) -> RunFolder:
        """The run of the median output throughput, the slower one of two in the middle: charts show this one."""
        ranked = sorted(self.runs, key=lambda run: float(run.summary.get("output_throughput") or 0.0))
        return ranked[(len(ranked) - 1) // 2]


def group_runs(folders: Sequence[RunFolder]) -> list[Candidate]:
    """Runs of equal configs are repeats of one candidate; candidates come in the order of their first run.

    A label says only what differs between the settings, as in `sarathi chunk=256`, and is unique.
    """
    groups: dict[str, list[RunFolder]] = {}
    for folder in folders:
        groups.setdefault(json.dumps(settings(folder.config), sort_keys=True, default=str), []).append(folder)
    runs = list(groups.values())
    labels = _labels(_folded([settings(group[0].config) for group in runs]), [group[0].title for group in runs])
    return [Candidate(label, group) for label, group in zip(labels, runs, strict=True)]


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's dotted keys and values, without those that say nothing of what the run did."""
    return dict(leaves({key: value for key, value in config.items() if key not in IGNORED}))


def differing_keys(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Dotted keys whose values differ between settings, in their order; the keys of a group (`scheduler.chunk`) only
    where they differ between settings that name the same member of it."""
    keys = dict.fromkeys(key for point in points for key in point)
    return [key for key in keys if any(len(values) > 1 for values in _values(points, key).values())]


def _values(points: Sequence[Mapping[str, Any]], key: str) -> dict[str, set[str]]:
    """By the member of the key's group, the values that the key takes."""
    group = key.partition(".")[0]
    found: dict[str, set[str]] = {}
    for point in points:
        member = str(point.get(f"{group}.name")) if group in GROUPS and key != f"{group}.name" else ""
        value = point.get(key, _MISSING)
        if value is not _MISSING:
            found.setdefault(member, set()).add(json.dumps(value, sort_keys=True, default=str))
    return found


def _folded(points: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Settings for labels: where a cost model was fitted anew, its many constants are told apart by one number."""
    keys = [key for key in differing_keys(points) if key.startswith(CONSTANTS)]
    if len(keys) < 3:
        return points
    fits = [json.dumps([point.get(key) for key in keys]) for point in points]
    each = list(dict.fromkeys(fits))
    return [
        {key: value for key, value in point.items() if key not in keys} | {CONSTANTS[:-1]: each.index(fit) + 1}
        for point, fit in zip(points, fits, strict=True)
    ]


def _labels(points: Sequence[Mapping[str, Any]], titles: Sequence[str]) -> list[str]:
    keys = differing_keys(points)
    if not keys:
        keys = ["scheduler.name"]
    # A policy's key reads better after its name, even where all candidates have the same policy.
    if len(keys) == 1 and keys[0].startswith("scheduler.") and keys[0] != "scheduler.name":
        keys.insert(0, "scheduler.name")
    keys.sort(key=lambda key: (key != "scheduler.name", not key.startswith("scheduler."), not key.endswith(".name")))
    shorts = [key.rpartition(".")[2] for key in keys]
    labels = []
    for point, title in zip(points, titles, strict=True):
        words = []
        for key, short in zip(keys, shorts, strict=True):
            group = key.partition(".")[0]
            if key not in point:
                continue
            if group in GROUPS and not key.endswith(".name"):
                member = str(point.get(f"{group}.name"))
                if len(_values(points, key).get(member, ())) < 2:
                    continue
            named = short if shorts.count(short) == 1 else key
            words.append(str(point[key]) if key.endswith(".name") else f"{named}={_text(point[key])}")
        labels.append(" ".join(words) or title)
    return _unique(labels)


def _unique(labels: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        result.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return result


def _text(value: Any) -> str:
    """A value as an override writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else json.dumps(value).replace('"', "").replace(" ", "")
