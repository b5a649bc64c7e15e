"""Prefills on pipelines of their own, in a simulation: `simulation.disaggregation.KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError, check, check_each

_KEY = "simulation.disaggregation"


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationConfig:
    """A pool of pipelines that prefill, before those of `simulation.replicas`, which then decode.

    The prefill pool samples the first token of a request. The keys and values of its prompt then go over the network
    to a pipeline of the decode pool, which has set their blocks aside.
    """

    prefill_replicas: int | None = None
    """pipelines that only prefill, simulation.replicas then only decode; null: all do both"""
    prefill_tp: int | None = None
    """their tensor-parallel ranks per stage; null: parallel.tp"""
    prefill_pp: int | None = None
    """their stages; null: parallel.pp"""
    prefill_layers: tuple[int, ...] | None = None
    """layers of each of their stages; null: balanced"""
    prefill_hardware: str | None = None
    """their hardware, by name; null: hardware"""
    prefill_chunk: int = 2048
    """most prompt tokens of their micro-batches, which hold several prompts where these fit (as token_budget)"""
    link: Literal["network", "node"] = "network"
    """what the KV cache crosses between the pools: the network, or the links of a node that both have devices on"""

    def __post_init__(self) -> None:
        pool = self.prefill_replicas
        check(f"{_KEY}.prefill_replicas", pool, pool is None or 1 <= pool <= 10_000, "null or 1 to 10000")
        check_each(f"{_KEY}.", self, lambda n: n >= 1, "1 or more", "prefill_tp", "prefill_pp", "prefill_chunk")
        layers, right = self.prefill_layers, "null or counts of 1 or more, one a stage"
        is_split = layers is None or min(layers, default=0) >= 1
        check(f"{_KEY}.prefill_layers", layers and list(layers), is_split, right)
        for name in ("prefill_tp", "prefill_pp", "prefill_layers", "prefill_hardware"):
            if pool is None and getattr(self, name) is not None:
                raise ConfigError(f"{_KEY}.{name}: there is no prefill pool without {_KEY}.prefill_replicas")

    @property
    def is_on(self) -> bool:
        """Whether there is a prefill pool."""
        return self.prefill_replicas is not None
