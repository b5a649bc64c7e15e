"""The keys of `gapless profile`: which micro-batches it measures, how often, and beside how many neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import check_each
from .schema import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig(EngineConfig):
    """The config of `gapless profile`, which measures the operators of a model's layers on this machine.

    It measures a grid of micro-batches. Other stages of the node compute at the same time, as they do in a run.
    """

    samples: int = 5
    """measurements of each micro-batch; more than a folder holds are added to it"""
    max_tokens: int = 2048
    """largest micro-batch that is measured"""
    max_context: int | None = None
    """longest context that is measured; null: the model's, at most twice max_tokens"""
    max_decodes: int = 32
    """most decodes of a micro-batch that is measured"""
    num_layers: int | None = None
    """layers of the stage that is measured; null: those of the largest stage, at most 8"""
    neighbours: int | None = None
    """other stages that compute at the same time; null: those that share a node"""
    pipeline: bool = True
    """also time whole micro-batches in the real pipeline: sends, dispatch, and stages that check the cost model"""
    check: str | None = None
    """measure nothing; show the errors of this profile folder"""
    import_: str | None = None
    """measure nothing; fit the hardware's constants to the published tables of operators in this folder"""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check_each("", self, lambda n: n >= 1, "1 or more", "samples", "max_decodes", "num_layers")
        check_each("", self, lambda n: n >= 16, "16 or more", "max_tokens", "max_context")
        check_each("", self, lambda n: n >= 0, "0 or more", "neighbours")
