"""The paper's evaluation (sections 3 to 5) as experiments. Each reproduces a figure or a table and compares numbers."""

from __future__ import annotations

from collections.abc import Callable

from ...conf.errors import ConfigError, nearest
from ...conf.policies import SarathiConfig
from ...conf.schema import SimulateConfig
from .artifact import Artifact, Row, Simulate, cells, number, write_artifact
from .figure3 import figure3
from .figure4 import figure4
from .figure7 import figure7
from .figure8 import figure8
from .figure9 import figure9
from .figure10 import figure10
from .figure11 import figure11
from .figure12 import figure12
from .figure13 import figure13
from .table2 import table2
from .table4 import table4

Experiment = Callable[[SimulateConfig, Simulate], Artifact]

EXPERIMENTS: dict[str, Experiment] = {
    "figure3": figure3,
    "figure4": figure4,
    "table2": table2,
    "figure7": figure7,
    "figure8": figure8,
    "table4": table4,
    "figure9": figure9,
    "figure10": figure10,
    "figure11": figure11,
    "figure12": figure12,
    "figure13": figure13,
}  # in the paper's order


def check_experiment(config: SimulateConfig) -> None:
    """Check that an experiment exists and can run with `config`.

    Raises:
        ConfigError: There is no such experiment, or the config sets a key that the experiment sets itself.
    """
    name, policy = config.experiment, config.scheduler
    if name not in EXPERIMENTS:
        raise ConfigError(f"experiment={name}: unknown{nearest(str(name), EXPERIMENTS)}")
    if config.policies or config.repeats > 1:
        key = "scheduler" if config.policies else "repeats"
        raise ConfigError(f"{key}: experiment={name} runs policies of its own, each once")
    if config.model.architecture is not None and config.model.architecture.experts is not None:
        raise ConfigError(f"model={config.model.name}: experiment={name} counts a model without experts; choose one")
    if not config.simulation.record:
        raise ConfigError(f"simulation.record=false: experiment={name} counts what each request lost; leave it true")
    if name == "figure12":
        if not isinstance(policy, SarathiConfig) or policy.chunk == "auto":
            raise ConfigError(
                f"scheduler={policy.name}: experiment={name} runs orca_best, sarathi and equal_time; "
                "set scheduler.batch, and a number as scheduler.chunk"
            )
    elif policy != SarathiConfig():
        raise ConfigError(f"scheduler={policy.name}: experiment={name} runs policies of its own, as the paper has them")


__all__ = [
    "EXPERIMENTS",
    "Artifact",
    "Experiment",
    "Row",
    "Simulate",
    "cells",
    "check_experiment",
    "number",
    "write_artifact",
]
