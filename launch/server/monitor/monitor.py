"""The parts of a server that show its run."""

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
    """The live page's streams and the recorders, one per replica, and what they have recorded."""

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
        """Make them for a model of this name. `config` is the server's, as a plain mapping."""
        words = partial(said_of, config=config)
        live = [Live(name, engine, n, said_of=words, has_chat=has_chat) for n in range(len(engine.replicas))]
        return cls(live, [Recorder(each, run_dir, config, versions) for each in engine.replicas])


def idle_by_cause(snapshot: Snapshot, now: float) -> list[dict[str, float]]:
    """Return the idle seconds of each stage until now, by the ledger's cause."""
    return [{cause.value: value for cause, value in zip(CAUSES, row, strict=True)} for row in idle_at(snapshot, now)]
