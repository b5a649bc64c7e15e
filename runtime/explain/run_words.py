"""What a run's config says for its sentences, and the paragraph of a page that they make."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from .changes import CHUNK_KEYS


def words_section(words: Sequence[str]) -> str:
    """Render sentences as the first paragraph of a page; empty if there are none."""
    if not words:
        return ""
    first, *rest = [html.escape(sentence) for sentence in words]
    more = f"<p>{' '.join(rest)}</p>" if rest else ""
    return f'<section class="verdict"><p><b>{first}</b></p>{more}</section>\n'


def policy_name(config: Mapping[str, Any]) -> str | None:
    """Return the name of the policy, where the config has one."""
    return _group(config, "scheduler").get("name")


def chunk_of(config: Mapping[str, Any]) -> int | None:
    """Return the most prompt tokens of a micro-batch, where the config's policy has such a number."""
    policy = _group(config, "scheduler")
    chunk = next((policy[key] for key in CHUNK_KEYS if key in policy), None)
    return chunk if isinstance(chunk, int) else None


def stage_layers(config: Mapping[str, Any]) -> list[int] | None:
    """Return the layers of each stage, where the config names them."""
    layers = _group(config, "parallel").get("layers")
    return None if layers is None else list(layers)


def token_bytes(config: Mapping[str, Any]) -> float | None:
    """Return the bytes of one token's activation, where the config has the model's sizes."""
    model = _group(config, "model")
    hidden, dtype = _group(model, "architecture").get("hidden_size"), model.get("dtype")
    if hidden is None or dtype is None:
        return None
    is_wide = dtype == "float32" or (dtype == "auto" and _group(config, "hardware").get("device") == "cpu")
    return float(hidden * (4 if is_wide else 2))


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
