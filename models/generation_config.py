"""The sampling values that a checkpoint recommends."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..conf.build import build
from ..conf.errors import ConfigError
from ..conf.sampling import SamplingParams
from ..conf.schema import ModelConfig
from .find_weights import find_weights
from .json_file import read_if_there, read_object

_log = logging.getLogger(__name__)
_FILE = "generation_config.json"
_NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_NAMES["max_new_tokens"] = "max_tokens"


def sampling_defaults(model: ModelConfig) -> dict[str, Any]:
    """Return the sampling parameters in generation_config.json that vLLM also applies, by their names here.

    `model.generation_config` names the file. Out-of-range values are ignored with a warning. GGUF files and random
    weights have no defaults. The result is logged.

    Raises:
        ConfigError: a named file is missing, or a file is not a JSON object.
    """
    if model.generation_config is None:
        return {}
    is_own = model.generation_config == "auto"
    where = find_weights(model, tensors=False) if is_own else Path(model.generation_config)
    if where is None:
        return {}
    file = where / _FILE if is_own or where.is_dir() else where
    found: dict[str, Any] = {}
    given = read_if_there(file) if is_own else read_object(file)
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
    if found:
        values = ", ".join(f"{name}={value}" for name, value in found.items())
        _log.info("sampling defaults: %s, by %s; model.generation_config=null: not", values, file)
    return found
