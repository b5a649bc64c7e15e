"""User-defined policies: a Python file with a `Scheduler` and, if the policy has keys, a `Config`.

Chosen by `scheduler=./FILE.py` or `LLM(..., scheduler="./FILE.py")`. This module loads the file and reads its keys;
`runtime.scheduler` finds the `Scheduler`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import traceback
import zlib
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigError
from .policies import SchedulerConfig
from .user_path import user_path

SUFFIX = ".py"
MODULE_PREFIX = "gapless_policy_"  # of the module names of policy files


def is_policy_file(choice: str) -> bool:
    """Return whether a choice of `scheduler` is a policy file."""
    return choice.endswith(SUFFIX)


def policy_mapping(file: str) -> dict[str, Any]:
    """Return the `scheduler` mapping of a policy file: its name, its path, and its keys with their defaults.

    Raises:
        ConfigError: as `load_policy_file` and `policy_config`.
    """
    path = _found(file)
    config = policy_config(str(path))(name=path.name, file=str(path))  # type: ignore[call-arg]
    return dataclasses.asdict(config)


def policy_config(file: str) -> type[SchedulerConfig]:
    """Return the file's `Config`, or `SchedulerConfig` if it has none, with two more keys.

    These are `name`, the name of the file, and `file`, its path.

    Raises:
        ConfigError: as `load_policy_file`; also if `Config` is not a frozen dataclass that extends `SchedulerConfig`,
            or one of its keys has no default.
    """
    return _config(load_policy_file(file), file)


def load_policy_file(file: str) -> ModuleType:
    """Load the file as a module, once per version of the file.

    Raises:
        ConfigError: no such file, or its code raises; the message then names the line.
    """
    path = _found(file)
    return _run(str(path), path.stat().st_mtime_ns)


def _found(file: str) -> Path:
    path = user_path(file, "scheduler").absolute()
    if not path.is_file():
        what = "is a folder; give the file" if path.is_dir() else "no such file"
        raise ConfigError(f"scheduler={file}: {what}")
    return path


@lru_cache(maxsize=64)
def _run(path: str, changed: int) -> ModuleType:
    name = f"{MODULE_PREFIX}{Path(path).stem}_{zlib.crc32(path.encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses resolve type names there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) and error.filename == path else lines[-1] if lines else 0
        raise ConfigError(f"{path}:{line}: {type(error).__name__}: {getattr(error, 'msg', error)}") from error
    return module


@lru_cache(maxsize=64)
def _config(module: ModuleType, file: str) -> type[SchedulerConfig]:
    own = getattr(module, "Config", SchedulerConfig)
    # A class without `@dataclass` inherits `__dataclass_fields__`, but has none of its own.
    if not (isinstance(own, type) and issubclass(own, SchedulerConfig) and "__dataclass_fields__" in vars(own)):
        raise ConfigError(f"{file}: Config must be a frozen dataclass that extends SchedulerConfig")
    for field in dataclasses.fields(own):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name != "name":
            raise ConfigError(f"{file}: Config.{field.name} must have a default")
    return dataclasses.make_dataclass(
        own.__name__,
        [("name", str), ("file", str)],
        bases=(own,),
        namespace={"__module__": module.__name__},
        frozen=True,
        slots=True,
        kw_only=True,
    )
