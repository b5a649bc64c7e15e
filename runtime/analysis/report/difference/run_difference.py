"""What two runs differ in: their settings and versions, the makespan by part and stage, and the requests of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...run_folder.read import RunFolder
from ..run_groups import RunGroup, differing_keys, override_text, settings
from .makespan_difference import MakespanDifference, compare_makespans
from .run_side import RunSide, ServedRequest


@dataclass(frozen=True, slots=True)
class Changed:
    """A difference between the runs: a key of the config, or the version of a package."""

    name: str
    base: str
    run: str

    @property
    def text(self) -> str:
        """The name and both values, in one line."""
        return f"{self.name}: {self.base} -> {self.run}"


@dataclass(frozen=True, slots=True)
class RequestChange:
    """A request of equal lengths in both runs."""

    request: int
    base: ServedRequest
    run: ServedRequest

    @property
    def change(self) -> float:
        """Seconds by which its end-to-end latency is longer; negative if shorter."""
        return self.run.latency - self.base.latency


class RunDifference:
    """The difference of the median runs of two settings.

    Args:
        groups: The base, and the other.
        sides: Their median runs.

    Attributes:
        labels: Their labels.
        folders: Their median runs.
        changed: The settings that differ, the scheduler's first, and then the versions.
        makespan: The change of the makespan.
        requests: Requests of equal lengths in both runs, the largest change of latency first.
    """

    def __init__(self, groups: Sequence[RunGroup], sides: Sequence[RunSide]) -> None:
        (base, run), (before, after) = groups, sides
        self.labels = base.label, run.label
        self.folders = base.median_run, run.median_run
        self.changed = _changed(*self.folders)
        self.makespan: MakespanDifference = compare_makespans(before, after)
        pairs = [(n, before.requests[n], after.requests[n]) for n in before.requests.keys() & after.requests.keys()]
        alike = [RequestChange(*pair) for pair in pairs if _lengths(pair[1]) == _lengths(pair[2])]
        self.requests = sorted(alike, key=lambda each: (-abs(each.change), each.request))
        self.num_requests = len(before.requests), len(after.requests)

    def numbers(self) -> dict[str, Any]:
        """Return the content of `difference` in comparison.json.

        Seconds are averages over the stages, except under `by_stage`. `parts`, and those of each stage, sum to
        `change`.
        """
        found = self.makespan
        return {
            "changed": [asdict(each) for each in self.changed],
            "makespan": {
                "base": found.base,
                "run": found.run,
                "change": found.change,
                "base_seconds": dict(found.before),
                "run_seconds": dict(found.after),
                "parts": dict(found.parts),
                "by_stage": [dict(parts) for parts in found.by_stage],
                "slowdown": found.slowdown,
                "slowdowns": list(found.slowdowns),
                "origin": asdict(found.origin),
            },
        }


def _lengths(request: ServedRequest) -> tuple[int, int]:
    return request.prompt, request.output


def _changed(base: RunFolder, run: RunFolder) -> list[Changed]:
    points = settings(base.config), settings(run.config)
    keys = sorted(differing_keys(points), key=lambda key: not key.startswith("scheduler."))
    found = [Changed(key.removesuffix(".name"), *(override_text(point[key]) for point in points)) for key in keys]
    before, after = (folder.summary.get("versions") or {} for folder in (base, run))
    found += [
        Changed(name, str(before[name]), str(after[name]))
        for name in before
        if name in after and before[name] != after[name]
    ]
    return found
