"""The relative times of layers, by which stages are balanced: a plug-in, so that serving needs no cost model."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import entry_points
from typing import Protocol

from ...conf.architecture import Architecture
from ...conf.schema import EngineConfig
from ...models.quantization.formats import ModelFormats

_log = logging.getLogger(__name__)


class LayerTimes(Protocol):
    """Returns the time that each layer adds to a request; the first includes the embedding, the last the LM head."""

    def __call__(
        self,
        config: EngineConfig,
        arch: Architecture,
        formats: ModelFormats,
        dtype_bytes: int,
        replicate_embedding: bool,
    ) -> list[float]:
        """Return seconds, of which only the ratios matter."""
        ...


@cache
def find_layer_times() -> LayerTimes | None:
    """Load the installed `gapless.layer_times` entry point; None, logged once, if it or its room is absent."""
    for entry in entry_points(group="gapless.layer_times"):
        try:
            found: LayerTimes = entry.load()
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("gapless."):
                raise
        else:
            return found
    _log.info("no cost model is installed: stages get equal numbers of layers; set parallel.layers for another split")
    return None
