"""The parts of each list in order, each with its time limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from .rows import Row


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: Its name, for `--only`.
        function: Its code, a `Measure`: `module:function`. Only the process that runs it imports the module.
        budget_s: Time limit in seconds, including the start of its process.
        process: Name of a process shared by consecutive parts, which keeps what they build on the device. Empty: its
            own process.
        needs: Parts whose rows it reads; they always run before it.
    """

    name: str
    function: str
    budget_s: float
    process: str = ""
    needs: tuple[str, ...] = ()

    def load(self) -> Measure:
        module, _, function = self.function.partition(":")
        loaded: Measure = getattr(import_module(module, __package__), function)
        return loaded


@dataclass(frozen=True, slots=True)
class Task:
    """The input of a part.

    Attributes:
        device: `cuda` or `cpu`.
        small: Whether to use tiny sizes, for a CPU.
        folder: For its files.
        found: Rows of the previous parts.
    """

    device: str
    small: bool
    folder: Path
    found: tuple[Row, ...]

    def value(self, part: str, quantity: str) -> float:
        """Return a value from a previous part.

        Raises:
            LookupError: there is none.
        """
        for row in self.found:
            if row.part == part and row.quantity == quantity and row.value is not None:
                return row.value
        raise LookupError(f"{part} found no {quantity}")


Measure = Callable[[Task], Iterator[Row]]


@dataclass(frozen=True, slots=True)
class PartList:
    """Parts that run in order.

    Attributes:
        parts: Most important first, because the last ones may run out of time.
        total_s: Time limit of all parts together, in seconds.
        devices: Number of GPUs needed.
    """

    parts: tuple[Part, ...]
    total_s: float
    devices: int = 1


LISTS = {
    "first": PartList(
        (
            Part("versions", ".versions:versions", 60),
            Part("attention", ".attention:attention", 90),
            Part("engine", ".engine:engine", 90),
            Part("graphs", ".graphs:graphs", 90),
            Part("decode_graphs", ".graphs:decode_graphs", 90),
            Part("waits", ".engine:waits", 60),
            Part("tests", ".gpu_tests:gpu_tests", 120),
            Part("middle", ".middle:middle", 45),
            Part("sampler", ".sampler:sampler", 60),
            Part("floor", ".floor:floor", 30),
            Part("goals", ".goals:goals", 60, needs=("floor",)),
            Part("spinning", ".spinning:spinning", 45),
        ),
        540.0,
    ),
    "two": PartList(
        (
            Part("one", ".ranks:one", 90),
            Part("tp2", ".ranks:tp2", 150, needs=("one",)),
            Part("pp2", ".ranks:pp2", 150, needs=("one",)),
            Part("kill_pp2", ".ranks:kill_pp2", 120, needs=("one",)),
            Part("kill_tp2", ".ranks:kill_tp2", 120, needs=("one",)),
        ),
        540.0,
        devices=2,
    ),
    "figures": PartList(
        (
            Part("floor", ".floor:floor", 20, "floor"),
            Part("figure4", ".figures:figure4", 40, "floor"),
            Part("plain", ".goals:plain", 30, "model", needs=("floor",)),
            Part("table2", ".figures:table2", 20, "model"),
            Part("figure3", ".figures:figure3", 30, "model"),
            Part("figure7", ".figures:figure7", 15, "model"),
            Part("figure8", ".figures:figure8", 40, "model"),
            Part("figure13", ".figures:figure13", 40, "model"),
            Part("profile", ".profile_folder:profile", 65, "profile"),
            Part("simulate", ".profile_folder:simulate", 40, "profile", needs=("profile",)),
        ),
        480.0,
    ),
}


def chosen(name: str, names: list[str]) -> list[Part]:
    """Return the named parts of a list and those that they need, in order; all parts if `names` is empty.

    Raises:
        ValueError: a name is unknown.
    """
    parts = LISTS[name].parts
    by_name = {part.name: part for part in parts}
    for each in names:
        if each not in by_name:
            raise ValueError(f"--only {each}: no such part; there are {', '.join(by_name)}")
    wanted = set(names or by_name)
    wanted |= {need for each in wanted for need in by_name[each].needs}
    return [part for part in parts if part.name in wanted]
