"""The error range of simulated stage times, and its source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....conf.costs import ErrorConfig

LOW, HIGH = 10, 90  # percentiles of the error


@dataclass(frozen=True, slots=True)
class CostError:
    """The 10th and 90th percentiles of real / predicted - 1 over stage times, and their source."""

    low: float
    high: float
    source: str

    @classmethod
    def of(cls, config: ErrorConfig) -> CostError:
        """Return the error given in a config."""
        return cls(config.low, config.high, config.source)

    @classmethod
    def from_ratios(cls, ratios: Iterable[float], source: str) -> CostError:
        """Compute the percentiles of real / predicted times."""
        low, high = (np.percentile(list(ratios), (LOW, HIGH)) - 1).tolist()
        return cls(low, high, source)

    @property
    def numbers(self) -> dict[str, Any]:
        """The `cost_error` entry of `summary.json`."""
        return {"low": self.low, "high": self.high, "source": self.source}

    @property
    def text(self) -> str:
        """The error range in one line: `stage times may be off by -5% to +22% (whole steps that were not fitted)`."""
        return f"stage times may be off by {self.low:+.0%} to {self.high:+.0%} ({self.source})"


def widest(errors: Iterable[CostError | None]) -> CostError | None:
    """Return the range that covers all `errors`; None if one is not known."""
    known: list[CostError] = []
    for error in errors:
        if error is None:
            return None
        known.append(error)
    sources = "; ".join(dict.fromkeys(error.source for error in known))
    return CostError(min(error.low for error in known), max(error.high for error in known), sources)


def error_text(error: CostError | None) -> str:
    """Return the error range in one line, or that it is not known."""
    return "the error of stage times is unknown: hardware.costs.error=null" if error is None else error.text
