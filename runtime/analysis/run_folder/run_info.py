"""A run's metadata: its config, package versions and latency bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from ....conf.workloads import SloConfig
from ..ledger.slo import has_bound
from .titles import title_of


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run's metadata, in addition to its record.

    Attributes:
        config: the run's config, by group and key.
        versions: package versions, by name.
        title: the report's title; by default `title_of` derives it from the config.
        slo: if it has bounds, the summary's config records them.
        cost_error: for a simulation: the error of its stage times; stored in the summary under this name.
    """

    config: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    slo: SloConfig | None = None
    cost_error: Mapping[str, Any] | None = None

    def summary(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of `summary.json`: `numbers`, and the run's metadata with the current date."""
        bounds = {"slo": asdict(self.slo)} if self.slo is not None and has_bound(self.slo) else {}
        return {
            "title": self.title or title_of(self.config),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            **numbers,
            **({"cost_error": dict(self.cost_error)} if self.cost_error is not None else {}),
            "config": dict(self.config) | bounds,
            "versions": dict(self.versions),
        }
