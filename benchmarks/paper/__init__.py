"""The paper's evaluation (sections 3 to 5) as experiments. Each reproduces a figure or a table and compares numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gapless.conf.errors import ConfigError, nearest
from gapless.conf.policies import SarathiConfig
from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one

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
from .settings import SETTINGS
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


def config_of(name: str, overrides: Sequence[str] = ()) -> SimulateConfig:
    """Return the config of an experiment, with overrides.

    Raises:
        ConfigError: unknown experiment, a wrong key, or a key that the experiment sets itself.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"{name}: unknown{nearest(name, EXPERIMENTS)}")
    given = dict(text.split("=", 1) for text in overrides)
    texts = [f"{key}={text}" for key, text in {**SETTINGS[name], **given}.items()]
    config = compose_one(texts, SimulateConfig, "simulate")
    if config.policies or config.repeats > 1:
        raise ConfigError(
            f"{'scheduler' if config.policies else 'repeats'}: {name} runs policies of its own, each once"
        )
    if config.model.architecture is not None and config.model.architecture.experts is not None:
        raise ConfigError(f"model={config.model.name}: {name} counts a model without experts; choose one")
    if not config.simulation.record:
        raise ConfigError(f"simulation.record=false: {name} counts what each request lost; leave it true")
    policy = config.scheduler
    is_right = isinstance(policy, SarathiConfig) and policy.chunk != "auto"
    if name == "figure12" and not is_right:
        raise ConfigError(
            f"scheduler={policy.name}: {name} runs orca_best, sarathi and equal_time; "
            "set scheduler.batch, and a number as scheduler.chunk"
        )
    if name != "figure12" and policy != SarathiConfig():
        raise ConfigError(f"scheduler={policy.name}: {name} runs policies of its own, as the paper has them")
    return config


__all__ = [
    "EXPERIMENTS",
    "Artifact",
    "Experiment",
    "Row",
    "Simulate",
    "cells",
    "config_of",
    "number",
    "write_artifact",
]
