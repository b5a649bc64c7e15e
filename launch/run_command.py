"""The command of a run, from its folder, as it was or under another setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from ..conf.build import build, fields
from ..conf.errors import ConfigError
from ..conf.schema import BenchConfig, EngineConfig, GenerateConfig, ServeConfig, SimulateConfig
from .overrides import command_line

if TYPE_CHECKING:
    from ..runtime.run_folder.read import RunFolder
    from ..runtime.simulation.setting import Setting

_COMMANDS: tuple[tuple[str, str, type[EngineConfig]], ...] = (  # by a key that no other command's config has
    ("simulation", "simulate", SimulateConfig),
    ("interleave", "bench", BenchConfig),
    ("sampling", "generate", GenerateConfig),
    ("serve", "serve", ServeConfig),
)


def command_writer(folder: RunFolder) -> Callable[[Setting, Sequence[str]], str | None]:
    """Return what writes the command of a run under another setting, that some overrides make of its own. It writes
    None where the run's own command is not known."""
    mapping = folder.composed
    name, cls = next(((name, cls) for key, name, cls in _COMMANDS if key in mapping), ("", EngineConfig))
    known = fields(cast(type, cls))
    try:
        config = build(cls, {key: value for key, value in mapping.items() if key in known}) if name else None
    except ConfigError:  # of another version
        config = None

    def write(setting: Setting, overrides: Sequence[str]) -> str | None:
        if config is None:
            return None
        changed = {key: getattr(setting.config, key) for key in ("scheduler", "parallel", "cache")}
        if isinstance(config, SimulateConfig):
            changed |= {key: getattr(setting.config, key) for key in ("hardware", "cluster", "simulation")}
        return command_line(replace(config, **changed), name, named=overrides)

    return write
