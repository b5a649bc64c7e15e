"""Two runs read for their difference: what was changed, and the change of the makespan, its requests and the tails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..ledger.difference import MakespanDifference, compare_makespans
from ..ledger.fleet import Fleet
from ..ledger.request_difference import RequestDifference, compare_requests
from ..ledger.run_noise import Noise, makespan_range, noise_of
from ..ledger.tail_difference import Latency, TailDifference, compare_tails
from ..run_folder.read import RunFolder, load_fleet
from ..run_folder.titles import is_simulated
from .run_groups import differing_keys, override_text, settings

BASE, RUN = "BASE", "RUN"  # what the two are called


@dataclass(frozen=True, slots=True)
class Changed:
    """Something that is not the same in both: a key of the config, or the version of a package."""

    name: str
    base: str
    run: str

    @property
    def text(self) -> str:
        return f"{self.name}: {self.base} -> {self.run}"


class RunDifference:
    """The difference of two runs, each with its repeats.

    Of repeats, the run with the median makespan is compared; of two in the middle the shorter.

    Args:
        base: the run that is compared with, and its repeats.
        run: the other.
    """

    def __init__(self, base: Sequence[RunFolder], run: Sequence[RunFolder]) -> None:
        self._repeats = (list(base), list(run))
        self.folders: tuple[RunFolder, RunFolder] = (_median(base), _median(run))
        self.fleets: tuple[Fleet, Fleet] = (load_fleet(self.folders[0]), load_fleet(self.folders[1]))
        for fleet in self.fleets:
            fleet.check()
        self.makespan: MakespanDifference = compare_makespans(*self.fleets)
        self.requests: RequestDifference = compare_requests(*self.fleets, self.makespan.weights)
        self.tails: dict[Latency, TailDifference] = compare_tails(*self.fleets)

    @property
    def repeats(self) -> tuple[int, int]:
        return len(self._repeats[0]), len(self._repeats[1])

    @property
    def simulated(self) -> tuple[bool, bool]:
        return is_simulated(self.folders[0].config), is_simulated(self.folders[1].config)

    @property
    def is_exact(self) -> bool:
        """Whether neither run varies: both are simulated without jitter, stragglers or faults."""
        return all(_is_exact(folder.config) for folder in self.folders)

    @cached_property
    def changed(self) -> list[Changed]:
        """The settings that differ, the scheduler's first, and then the versions."""
        points = [settings(folder.config) for folder in self.folders]
        keys = [key for key in differing_keys(points) if key.partition(".")[0] != "simulation" or all(self.simulated)]
        keys += [key for key in _only_in_one(points) if key not in keys]
        keys.sort(key=lambda key: not key.startswith("scheduler."))
        found = [
            Changed(key.removesuffix(".name"), *(override_text(p[key]) if key in p else "-" for p in points))
            for key in keys
        ]
        versions = [folder.summary.get("versions") or {} for folder in self.folders]
        names = dict.fromkeys([*versions[0], *versions[1]])
        before, after = versions
        found += [
            Changed(name, str(before[name]), str(after[name]))
            for name in names
            if name in before and name in after and before[name] != after[name]
        ]
        return found

    @cached_property
    def makespan_noise(self) -> Noise | None:
        """How far the makespans are by chance; None where they are exact."""
        if self.is_exact:
            return None
        weights = self.makespan.weights
        base, run = (
            makespan_range(fleet, weights) if len(mine) == 1 else (0.0, 0.0)
            for fleet, mine in zip(self.fleets, self._repeats, strict=True)
        )
        return noise_of(*self._values("duration", 1.0), base, run)

    def tail_noise(self, latency: Latency) -> Noise | None:
        """How far a P99 is by chance; None where it is exact."""
        if self.is_exact:
            return None
        found = self.tails[latency]
        base, run = (found.base.low, found.base.high), (found.run.low, found.run.high)
        return noise_of(*self._values(f"p99_{latency}_ms", 1e-3), base, run)

    def _values(self, key: str, unit: float) -> tuple[list[float], list[float]]:
        base, run = ([unit * float(folder.summary[key]) for folder in mine] for mine in self._repeats)
        return base, run


def _median(folders: Sequence[RunFolder]) -> RunFolder:
    ranked = sorted(folders, key=lambda folder: float(folder.summary.get("duration") or 0.0))
    return ranked[(len(ranked) - 1) // 2]


def _is_exact(config: Mapping[str, Any]) -> bool:
    simulation = config.get("simulation")
    if not isinstance(simulation, Mapping):
        return False
    faults = simulation.get("faults") or {}
    return not (simulation.get("jitter") or simulation.get("straggler_rate") or faults.get("rank_mtbf_s"))


def _only_in_one(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys outside of sections that only one of the two has, as a file that only one was given."""
    base, run = points
    return [key for key in (*base, *run) if "." not in key and (key in base) != (key in run)]
