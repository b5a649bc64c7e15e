"""Config of `gapless profile`: which micro-batches are measured, how often, and with how many neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .ranges import AT_LEAST_ONE, NOT_NEGATIVE, Within
from .schema import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig(EngineConfig):
    """`gapless profile`: measures the operators of a model's layers on this machine.

    It measures a grid of micro-batches while the other stages of the node compute, as in a run.
    """

    samples: Annotated[int, AT_LEAST_ONE] = 5
    """measurements per micro-batch; missing ones are added to an existing folder"""
    max_tokens: Annotated[int, Within(16)] = 2048
    """largest micro-batch that is measured"""
    max_context: Annotated[int | None, Within(16)] = None
    """longest context that is measured; null: the model's maximum, up to twice max_tokens"""
    max_decodes: Annotated[int, AT_LEAST_ONE] = 32
    """largest number of decodes per micro-batch that is measured"""
    num_layers: Annotated[int | None, AT_LEAST_ONE] = None
    """layers of the measured stage; null: as in the largest stage, up to 8"""
    neighbours: Annotated[int | None, NOT_NEGATIVE] = None
    """stages that compute concurrently; null: all stages of a node"""
    pipeline: bool = True
    """also measure whole micro-batches in the real pipeline: sends, dispatch, stage times to validate the cost model"""
    check: str | None = None
    """measure nothing; print the errors of this profile folder"""
