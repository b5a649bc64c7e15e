"""Prints by hydra instead of running: a composed config (`--cfg`), what it comes from (`--info`), hydra's help."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr

from ..conf.build import dotted_keys
from ..conf.errors import ConfigError, nearest
from ..conf.schema import EngineConfig
from . import compose
from .commands import Command


def show(command: Command, overrides: Sequence[str], options: Mapping[str, str]) -> None:
    """Print what `options` ask for.

    Raises:
        ConfigError: the overrides do not compose, or `--package` names no part of the config.
    """
    cls = command.config
    assert issubclass(cls, EngineConfig)
    (point,) = compose.compose_all(overrides, cls, command.name)

    import hydra

    given = [part for name, value in options.items() for part in (name, value) if part]
    start = hydra.main(config_path=f"pkg://{compose.CONFIG_MODULE}", config_name=command.name, version_base="1.3")
    before, root = sys.argv, logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    sys.argv = [f"gapless {command.name}", *given, *point.overrides]
    messages = io.StringIO()
    try:
        with redirect_stderr(messages):
            start(lambda config: None)()
    except SystemExit as end:  # how hydra ends its help, with 0, and where it finds no such package
        if end.code and "--package" in options:
            package = options["--package"]
            parts = {key.rpartition(".")[0] for key, _ in dotted_keys(cls)} - {""}
            raise ConfigError(f"--package {package}: no such part of the config{nearest(package, parts)}") from None
        if end.code:
            raise ConfigError(messages.getvalue()) from None
    finally:
        sys.argv = before
        root.setLevel(level)
        root.handlers[:] = handlers  # --info prints by a handler of its own
