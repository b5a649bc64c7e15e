"""Builds a rank's shard of a stage and loads its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from ..parallel.groups import Groups
from .checkpoint import Checkpoint
from .quantization.formats import model_formats
from .stage import Stage
from .stage_spec import StageSpec
from .weights import load_stage


def build_stage(spec: StageSpec, groups: Groups, on_piece: Callable[[], None] = lambda: None) -> Stage:
    """Build this rank's shard of a stage, allocate its KV cache and load its weights.

    `on_piece` is called before each piece of the weights is loaded.

    Raises:
        ConfigError: a tensor is missing or has the wrong shape, or the attention backend does not run here.
    """
    checkpoint, device = Checkpoint.open(spec.model), groups.device.type
    source = checkpoint.tensors(spec.arch, spec.seed)
    formats = model_formats(source.format, spec.arch, groups.mesh.tp, device, whole_experts=spec.whole_experts)
    model = replace(spec.model, dtype=checkpoint.dtype(device))
    stage = Stage(msgspec.structs.replace(spec, model=model), groups, formats)
    load_stage(stage, source, on_piece)
    return stage
