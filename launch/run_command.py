"""Writes the command line that would run a recorded run again with other settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ..conf.build import build, fields
from ..conf.errors import ConfigError
from ..conf.schema import BenchConfig, ChatConfig, EngineConfig, GenerateConfig, ServeConfig, SimulateConfig
from .overrides import command_line

if TYPE_CHECKING:
    from ..runtime.simulation.setting import Setting

# A key that only this command's config has, the command, and its config.
_COMMANDS: tuple[tuple[str, str, type[EngineConfig]], ...] = (
    ("simulation", "simulate", SimulateConfig),
    ("interleave", "bench", BenchConfig),
    ("system", "chat", ChatConfig),
    ("sampling", "generate", GenerateConfig),
    ("serve", "serve", ServeConfig),
)


def command_writer(recorded: Mapping[str, Any]) -> Callable[[Setting, Sequence[str]], str | None]:
    """Return a function that writes the command line of a run with a changed setting.

    Args:
        recorded: the run's config, as `summary.json` has it.

    Returns:
        A function of the changed setting and of the overrides that made it from the run's own. It returns None if the
        run's own command is not known.
    """
    from ..runtime.run_folder.read import with_infinities

    mapping = with_infinities(recorded)
    name, cls = next(((name, cls) for key, name, cls in _COMMANDS if key in mapping), ("", EngineConfig))
    known = fields(cast(type, cls))
    try:
        config = build(cls, {key: value for key, value in mapping.items() if key in known}) if name else None
    except ConfigError:  # written by another version
        config = None

    def write(setting: Setting, overrides: Sequence[str]) -> str | None:
        if config is None:
            return None
        changed = {key: getattr(setting.config, key) for key in ("scheduler", "parallel", "cache")}
        if isinstance(config, SimulateConfig):
            changed |= {key: getattr(setting.config, key) for key in ("hardware", "cluster", "simulation")}
        return command_line(replace(config, **changed), name, named=overrides)

    return write
