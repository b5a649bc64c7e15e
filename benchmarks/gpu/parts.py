"""The parts of the measurement, in their order, each with the time that it may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from .rows import Row

TOTAL_S = 480.0


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: Its name, for `--only`.
        function: Its code, a `Measure`: `module:function`. Only the process that runs it imports the module.
        budget_s: Seconds after which it is ended, the start of its process included.
        process: The process that it shares with its neighbours of the same name; what they build on the device stays.
        needs: Parts whose rows it reads; they run before it, asked for or not.
    """

    name: str
    function: str
    budget_s: float
    process: str
    needs: tuple[str, ...] = ()

    def load(self) -> Measure:
        module, _, function = self.function.partition(":")
        loaded: Measure = getattr(import_module(module, __package__), function)
        return loaded


@dataclass(frozen=True, slots=True)
class Task:
    """What a part gets to know.

    Attributes:
        device: `cuda` or `cpu`.
        small: Whether sizes are tiny, for a CPU.
        folder: Where it may write files.
        found: The rows of the parts before.
    """

    device: str
    small: bool
    folder: Path
    found: tuple[Row, ...]

    def value(self, part: str, quantity: str) -> float:
        """Return a number that a part before found.

        Raises:
            LookupError: It found none.
        """
        for row in self.found:
            if row.part == part and row.quantity == quantity and row.value is not None:
                return row.value
        raise LookupError(f"{part} found no {quantity}")


Measure = Callable[[Task], Iterator[Row]]

# Budgets add up to less than TOTAL_S.
PARTS = (
    Part("attention", ".checks:attention", 40, "checks"),
    Part("tokens", ".checks:tokens", 35, "checks"),
    Part("logits", ".checks:logits", 25, "checks"),
    Part("floor", ".floor:floor", 20, "checks"),
    Part("figure4", ".figures:figure4", 40, "checks"),
    Part("plain", ".goals:plain", 30, "model", needs=("floor",)),
    Part("goals", ".goals:goals", 40, "model", needs=("floor",)),
    Part("table2", ".figures:table2", 20, "model"),
    Part("figure3", ".figures:figure3", 30, "model"),
    Part("figure7", ".figures:figure7", 15, "model"),
    Part("figure8", ".figures:figure8", 40, "model"),
    Part("figure13", ".figures:figure13", 40, "model"),
    Part("profile", ".profile_folder:profile", 65, "profile"),
    Part("simulate", ".profile_folder:simulate", 40, "profile", needs=("profile",)),
)


def chosen(names: list[str]) -> list[Part]:
    """Return the parts of these names and what they need, in order; all parts without names.

    Raises:
        ValueError: There is no part of such a name.
    """
    by_name = {part.name: part for part in PARTS}
    for name in names:
        if name not in by_name:
            raise ValueError(f"--only {name}: no such part; there are {', '.join(by_name)}")
    wanted = set(names or by_name)
    wanted |= {need for name in wanted for need in by_name[name].needs}
    return [part for part in PARTS if part.name in wanted]
