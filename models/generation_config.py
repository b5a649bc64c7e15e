"""The sampling values that a checkpoint recommends."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..conf.build import build
from ..conf.errors import ConfigError
from ..conf.sampling import SamplingParams
from .json_file import read_if_there

_log = logging.getLogger(__name__)
_NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_NAMES["max_new_tokens"] = "max_tokens"


def sampling_defaults(folder: Path | None) -> dict[str, Any]:
    """Return the sampling parameters in generation_config.json that vLLM takes over, by their names here.

    Values out of their range are left out, with a warning. A GGUF file (or None) has no values.

    Raises:
        ConfigError: the file cannot be read as a JSON object.
    """
    file = None if folder is None else folder / "generation_config.json"
    given = {} if file is None else read_if_there(file)
    found: dict[str, Any] = {}
    for key, name in _NAMES.items():
        if (value := given.get(key)) is None or (key == "top_k" and value == -1):
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            build(SamplingParams, {name: value}, "sampling")
        except ConfigError as error:
            _log.warning("%s: %s; the value is ignored", file, str(error).replace("sampling.", "").replace(name, key))
        else:
            found[name] = value
    return found
