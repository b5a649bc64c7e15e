"""Monitoring of a server: the live page and recordings of all replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ....runtime.analysis.ledger.causes import CAUSES
from ....runtime.analysis.live.idle_now import idle_at
from ....runtime.serving.messages import Snapshot
from ..replica_set import Engine
from .live import Live
from .live_window import said_of
from .recorder import Recorder
from .recordings import Recordings


@dataclass(frozen=True, slots=True)
class Monitor:
    """The live streams and recorders, one per replica, and the finished recordings."""

    live: Sequence[Live]
    recorders: Sequence[Recorder]
    recordings: Recordings = field(default_factory=Recordings)

    @classmethod
    def of(
        cls,
        name: str,
        engine: Engine,
        run_dir: Path,
        config: Mapping[str, Any],
        versions: Mapping[str, str],
        *,
        has_chat: bool = False,
    ) -> Monitor:
        """Build the monitor of a server. `config` is the server's config as a plain mapping."""
        words = partial(said_of, config=config)
        live = [Live(name, engine, n, said_of=words, has_chat=has_chat) for n in range(len(engine.replicas))]
        return cls(live, [Recorder(each, run_dir, config, versions) for each in engine.replicas])


def idle_by_cause(snapshot: Snapshot, now: float) -> list[dict[str, float]]:
    """Return the idle seconds of each stage up to now, by cause of the ledger."""
    return [{cause.value: value for cause, value in zip(CAUSES, row, strict=True)} for row in idle_at(snapshot, now)]
