"""Returns the command line that repeats a recorded run with other settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ..conf.build import build, fields
from ..conf.errors import ConfigError
from ..conf.schema import BenchConfig, ChatConfig, EngineConfig, GenerateConfig, ServeConfig, SimulateConfig
from .overrides import command_line

if TYPE_CHECKING:
    from ..runtime.simulation.pipeline.setting import Setting

# A key that identifies a command's config, the command, and its config class.
_COMMANDS: tuple[tuple[str, str, type[EngineConfig]], ...] = (
    ("simulation", "simulate", SimulateConfig),
    ("interleave", "bench", BenchConfig),
    ("system", "chat", ChatConfig),
    ("sampling", "generate", GenerateConfig),
    ("serve", "serve", ServeConfig),
)


def command_writer(recorded: Mapping[str, Any]) -> Callable[[Setting, Sequence[str]], str | None]:
    """Return a function that returns the command line of a run with a changed setting.

    Args:
        recorded: the run's config from `summary.json`.

    Returns:
        A function of the changed setting and the overrides that produced it. It returns None if the command of the
        run is unknown.
    """
    from ..runtime.analysis.run_folder.read import with_infinities

    mapping = with_infinities(recorded)
    name, cls = next(((name, cls) for key, name, cls in _COMMANDS if key in mapping), ("", EngineConfig))
    known = fields(cast(type, cls))
    try:
        config = build(cls, {key: value for key, value in mapping.items() if key in known}) if name else None
    except ConfigError:  # from another version
        config = None

    def write(setting: Setting, overrides: Sequence[str]) -> str | None:
        if config is None:
            return None
        changed = {key: getattr(setting.config, key) for key in ("scheduler", "parallel", "cache")}
        if isinstance(config, SimulateConfig):
            changed |= {key: getattr(setting.config, key) for key in ("hardware", "cluster", "simulation")}
        return command_line(replace(config, **changed), name, named=overrides)

    return write
