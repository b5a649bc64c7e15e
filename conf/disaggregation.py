"""Simulated prefill/decode disaggregation: `simulation.disaggregation.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from .errors import ConfigError, check
from .ranges import AT_LEAST_ONE, Within, check_ranges

_KEY = "simulation.disaggregation"


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationConfig:
    """A pool of prefill pipelines; the pipelines of `simulation.replicas` then form the decode pool.

    The prefill pool samples the first token of a request. The KV cache of its prompt is then transferred over the
    network to a pipeline of the decode pool, which has reserved the blocks.
    """

    prefill_replicas: Annotated[int | None, Within(1, 10_000)] = None
    """number of prefill pipelines; simulation.replicas then only decode; null: no disaggregation"""
    prefill_tp: Annotated[int | None, AT_LEAST_ONE] = None
    """tensor-parallel ranks per prefill stage; null: parallel.tp"""
    prefill_pp: Annotated[int | None, AT_LEAST_ONE] = None
    """stages of a prefill pipeline; null: parallel.pp"""
    prefill_layers: tuple[int, ...] | None = None
    """layers per prefill stage; null: balanced"""
    prefill_hardware: str | None = None
    """hardware of the prefill pipelines, by name; null: hardware"""
    prefill_chunk: Annotated[int, AT_LEAST_ONE] = 2048
    """maximum prompt tokens per prefill micro-batch, which may batch several prompts (as token_budget)"""
    link: Literal["network", "node"] = "network"
    """link of the KV cache transfer: the network, or within a node that both pools share"""

    def __post_init__(self) -> None:
        check_ranges(self, f"{_KEY}.")
        layers, right = self.prefill_layers, "null or counts of 1 or more, one per stage"
        is_split = layers is None or min(layers, default=0) >= 1
        check(f"{_KEY}.prefill_layers", layers and list(layers), is_split, right)
        for name in ("prefill_tp", "prefill_pp", "prefill_layers", "prefill_hardware"):
            if self.prefill_replicas is None and getattr(self, name) is not None:
                raise ConfigError(f"{_KEY}.{name}: needs a prefill pool; set {_KEY}.prefill_replicas")

    @property
    def is_on(self) -> bool:
        """Whether there is a prefill pool."""
        return self.prefill_replicas is not None
