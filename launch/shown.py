"""hydra output without a run: the composed config (`--cfg`), its composition (`--info`), hydra's help."""

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
    """Print the output of `options`.

    Raises:
        ConfigError: the overrides do not compose, or `--package` is not a part of the config.
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
    except SystemExit as end:  # after hydra's help (code 0), or for an unknown package
        if end.code and "--package" in options:
            package = options["--package"]
            parts = {key.rpartition(".")[0] for key, _ in dotted_keys(cls)} - {""}
            raise ConfigError(f"--package {package}: not a part of the config{nearest(package, parts)}") from None
        if end.code:
            raise ConfigError(messages.getvalue()) from None
    finally:
        sys.argv = before
        root.setLevel(level)
        root.handlers[:] = handlers  # --info adds its own handler
