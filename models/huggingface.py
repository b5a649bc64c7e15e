"""A Hugging Face folder, without torch: where the weights lie, and what architecture its config.json describes."""
from __future__ import annotations
from pathlib import Path
from ..conf.schema import Architecture, ModelConfig
def resolve_weights(model: ModelConfig) -> Path | None:
    return None if model.weights == "random" else Path(model.weights)
def resolve_architecture(model: ModelConfig) -> Architecture:
    assert model.architecture
    return model.architecture
