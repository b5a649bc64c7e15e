"""Two runs read for their difference: what was changed, and the change of the makespan, its requests and the tails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..ledger.fleet import Fleet
from ..report.run_groups import override_text, settings
from ..run_folder.read import RunFolder, load_fleet
from ..run_folder.titles import is_simulated
from .difference import MakespanDifference, compare_makespans
from .request_difference import RequestDifference, compare_requests
from .run_noise import Noise, noise_by_repeats
from .tail_difference import Latency, TailDifference, compare_tails

BASE, RUN = "BASE", "RUN"  # what the two are called


@dataclass(frozen=True, slots=True)
class Changed:
    """Something that is not the same in both: a key of the config, or the version of a package."""

    name: str
    base: str
    run: str

    @property
    def text(self) -> str:
        """The name and both values, in one line."""
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
        """How many runs of the base and of the other there are, those compared among them."""
        return len(self._repeats[0]), len(self._repeats[1])

    @property
    def simulated(self) -> tuple[bool, bool]:
        """Whether the base is simulated, and whether the other is."""
        return is_simulated(self.folders[0].config), is_simulated(self.folders[1].config)

    @property
    def is_exact(self) -> bool:
        """Whether neither run varies: both are simulated without jitter, stragglers or faults."""
        return all(_is_exact(folder.config) for folder in self.folders)

    @cached_property
    def changed(self) -> list[Changed]:
        """The settings that differ, the scheduler's first and those that only one has last, and then the versions."""
        base, run = (settings(folder.config) for folder in self.folders)
        keys = [key for key in dict.fromkeys([*base, *run]) if _differs(key, base, run)]
        if not all(self.simulated):
            keys = [key for key in keys if not key.startswith("simulation.")]
        keys.sort(key=lambda key: (key not in base or key not in run, not key.startswith("scheduler.")))
        found = [
            Changed(key.removesuffix(".name"), *(override_text(p[key]) if key in p else "-" for p in (base, run)))
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
        """How far the makespans are by chance; None where they are exact, or no repeats show it."""
        return self._noise(self.makespan.base, self.makespan.run, "duration", 1.0)

    def tail_noise(self, latency: Latency) -> Noise | None:
        """Return how far a P99 is by chance; None where it is exact, or no repeats show it."""
        tail = self.tails[latency]
        return self._noise(tail.base.seconds, tail.run.seconds, f"p99_{latency}_ms", 1e-3)

    def _noise(self, base: float, run: float, key: str, unit: float) -> Noise | None:
        repeats = [[unit * float(folder.summary[key]) for folder in mine] for mine in self._repeats]
        return None if self.is_exact else noise_by_repeats(base, run, repeats)


def _median(folders: Sequence[RunFolder]) -> RunFolder:
    ranked = sorted(folders, key=lambda folder: float(folder.summary.get("duration") or 0.0))
    return ranked[(len(ranked) - 1) // 2]


def _is_exact(config: Mapping[str, Any]) -> bool:
    simulation = config.get("simulation")
    if not isinstance(simulation, Mapping):
        return False
    faults = simulation.get("faults") or {}
    return not (simulation.get("jitter") or simulation.get("straggler_rate") or faults.get("rank_mtbf_s"))


def _differs(key: str, base: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Return whether a key's values differ; of a section with a name, if the names differ, only the name does."""
    if base.get(key) == run.get(key):
        return False
    name = f"{key.partition('.')[0]}.name"
    return key == name or base.get(name) == run.get(name)
