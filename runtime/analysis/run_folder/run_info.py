"""What stands beside a run's record: its config, the packages' versions, its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from ...conf.workloads import SloConfig
from ..ledger.slo import has_bound
from .titles import title_of


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run was, beside what was recorded of it.

    Attributes:
        config: the run's config, by group and key.
        versions: of the packages that ran, by name.
        title: of the report; by default what `title_of` makes of the config.
        slo: with bounds, the summary has `request_goodput`.
        cost_error: of a simulation: how far its stage times may be off; the summary has it under this name.
    """

    config: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    slo: SloConfig | None = None
    cost_error: Mapping[str, Any] | None = None

    def summary(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `summary.json` holds: `numbers`, and of which run they are, with the date of now."""
        bounds = {"slo": asdict(self.slo)} if self.slo is not None and has_bound(self.slo) else {}
        return {
            "title": self.title or title_of(self.config),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            **numbers,
            **({"cost_error": dict(self.cost_error)} if self.cost_error is not None else {}),
            "config": dict(self.config) | bounds,
            "versions": dict(self.versions),
        }
