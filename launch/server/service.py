"""What the server's paths work with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...conf.serving import ServingConfig
from ...runtime.engine.intake import Intake
from .compiler import Compiler
from .fields import UnknownFields
from .journaling import Journaling
from .keys import Keys
from .live import Live
from .prometheus import Metrics
from .rate_limit import RateLimits
from .recorder import Recorder
from .recordings import Recordings
from .replica_set import Engine
from .tools.dialect import Dialect


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The checked configuration, and the parts of the server that live as long as it."""

    config: ServingConfig
    keys: Keys
    model: str
    max_model_len: int
    intake: Intake
    compiler: Compiler
    client: Engine
    metrics: Metrics
    live: Sequence[Live]  # one of each replica, as the recorders
    recorders: Sequence[Recorder]
    is_local: bool  # only this machine reaches the server
    sampling: Mapping[str, Any] = field(default_factory=dict)  # values for requests that give none
    journaling: Journaling | None = None
    dialect: Dialect | None = None  # of a model with a chat template
    unknown: UnknownFields = field(default_factory=UnknownFields)
    has_priorities: bool = False  # scheduler.order reads them
    limits: RateLimits = field(default_factory=RateLimits)
    recordings: Recordings = field(default_factory=Recordings)
    rendering: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a chat is rendered
    aliases: Sequence[str] = ()  # further names of the model in requests

    @property
    def names(self) -> Sequence[str]:
        """The names of the model, that in answers first."""
        return (self.model, *self.aliases)
