"""The lead of a search's winner over the next setting, and whether it survives the cost model's error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .error_range import ErrorRange, range_text
from .search_result import Finalist
from .space import Candidate


@dataclass(frozen=True, slots=True)
class Lead:
    """The winner's lead over the next setting that carries less, and whether it survives the cost model's error.

    Attributes:
        over: The other setting.
        own: The winner's capacity at both ends of the error.
        other: The other setting's capacity at both ends.
        share: How much less it carries, as a share of the winner's capacity.
        same_grid: Both have the same tensor-parallel size and stages, so that both are assumed to have the same error.
    """

    over: Candidate
    own: ErrorRange
    other: ErrorRange
    share: float
    same_grid: bool

    @property
    def if_alike(self) -> bool:
        """Whether the winner carries more at both ends if both have the same error."""
        return self.own.low > self.other.low and self.own.high > self.other.high

    @property
    def if_apart(self) -> bool:
        """Whether it carries more even with opposite errors: its own times longest, the other's shortest."""
        return self.own.low > self.other.high

    @property
    def survives(self) -> bool:
        """Whether the lead survives every error that is assumed possible."""
        return self.if_alike and (self.same_grid or self.if_apart)

    @property
    def text(self) -> str:
        """The lead as text, with the assumption."""
        ranges = f"{range_text(self.other)} against {range_text(self.own)} requests/s"
        if not self.if_alike:
            why = "if stage times are off, it may carry as much or more"
        elif self.same_grid:
            why = "if stage times are off, it still carries less, since both are on the same grid and off alike"
        elif self.if_apart:
            why = "if stage times are off, it still carries less, even with opposite errors of the two grids"
        else:
            why = "if stage times are off, it carries less only if both grids are off alike"
        return f"{self.over.label} carries {self.share:.0%} less; {why} ({ranges})"

    @property
    def numbers(self) -> dict[str, Any]:
        """Its entry in `tune.json`."""
        return {
            "over": self.over.label,
            "share": self.share,
            "same_grid": self.same_grid,
            "if_alike": self.if_alike,
            "if_apart": self.if_apart,
            "survives": self.survives,
            "note": self.text,
        }


def lead_of(finalists: Sequence[Finalist]) -> Lead | None:
    """Return the lead of the first of `finalists`; None if no other carries less or the error is not known."""
    for finalist in finalists[1:]:
        first = finalists[0]
        own, other = first.off, finalist.off
        if finalist.verdict != "less" or own is None or other is None:
            continue
        grids = [(each.candidate.tp, each.candidate.pp) for each in (first, finalist)]
        return Lead(
            over=finalist.candidate,
            own=own,
            other=other,
            share=1 - finalist.interval.mean / first.interval.mean,
            same_grid=grids[0] == grids[1],
        )
    return None
