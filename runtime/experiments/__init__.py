"""The paper's evaluation (sections 3 to 5) as experiments: each composes and simulates, and compares with the paper."""

from __future__ import annotations

from collections.abc import Callable

from ...conf.schema import SimulateConfig
from .artifact import Artifact, Row, Simulate, cells, number, write_artifact
from .table2 import table2

Experiment = Callable[[SimulateConfig, Simulate], Artifact]

EXPERIMENTS: dict[str, Experiment] = {
    "table2": table2,
}

__all__ = ["EXPERIMENTS", "Artifact", "Experiment", "Row", "Simulate", "cells", "number", "write_artifact"]
