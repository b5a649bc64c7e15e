"""Shared state of the server's handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...conf.serving import ServingConfig
from ...runtime.engine.intake import Intake
from .compiler import Compiler
from .errors import ApiError
from .fields import UnknownFields
from .journaling import Journaling
from .keys import Keys
from .prometheus import Metrics
from .rate_limit import RateLimits
from .replica_set import Engine
from .tools.dialect import Dialect

if TYPE_CHECKING:
    from .monitor.monitor import Monitor


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The validated configuration and the long-lived components of the server."""

    config: ServingConfig
    keys: Keys
    model: str
    max_model_len: int
    intake: Intake
    compiler: Compiler
    client: Engine
    metrics: Metrics
    is_local: bool  # only this machine can reach the server
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults of requests
    journaling: Journaling | None = None
    dialect: Dialect | None = None  # if the model has a chat template
    unknown: UnknownFields = field(default_factory=UnknownFields)
    has_priorities: bool = False  # scheduler.order uses them
    limits: RateLimits = field(default_factory=RateLimits)
    monitor: Monitor | None = None  # None: the rooms that it needs are not installed
    rendering: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a chat is rendered
    aliases: Sequence[str] = ()  # further names of the model in requests

    @property
    def names(self) -> Sequence[str]:
        """The names of the model, starting with the name in answers."""
        return (self.model, *self.aliases)

    def check_model(self, name: str | None) -> None:
        """Check the model that a request names.

        Raises:
            ApiError: this server does not serve it.
        """
        if name is not None and name not in self.names and not self.config.takes_any_name:
            raise ApiError(
                404,
                f"The model `{name}` does not exist; this server has {', '.join(f'`{each}`' for each in self.names)}.",
                param="model",
                code="model_not_found",
                anthropic=f"model: {name}",
            )
