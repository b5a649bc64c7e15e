"""The names and shapes of a checkpoint's tensors, by model family. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..conf.architecture import Architecture
from ..conf.errors import ConfigError, nearest
from .families import FAMILIES
from .families.family import Family
from .names import Names, weight_of


def names_of(arch: Architecture) -> Names:
    """Return the tensor names of the architecture's family."""
    return family_of(arch).names


def family_of(arch: Architecture) -> Family:
    """Return the architecture's family.

    Raises:
        ConfigError: there is none of this name.
    """
    if arch.family not in FAMILIES:
        raise ConfigError(f"model.architecture.family={arch.family}: unknown{nearest(arch.family, FAMILIES)}")
    return FAMILIES[arch.family]


def tensor_shapes(arch: Architecture, names: Names | None = None) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a checkpoint of `arch`, by name: by `names_of(arch)` or those given."""
    names, H, D = names or names_of(arch), arch.hidden_size, arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (arch.vocab_size, H)}

    def linear(parts: Sequence[tuple[str, int]], in_size: int, bias: bool) -> None:
        """Add weights of so many outputs each; parts of one name are one tensor."""
        widths: dict[str, int] = {}
        for name, out_size in parts:
            widths[name] = widths.get(name, 0) + out_size
        for name, out_size in widths.items():
            shapes[prefix + weight_of(name)] = (in_size, out_size) if names.transposed else (out_size, in_size)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (out_size,)

    def norm(name: str) -> None:
        if arch.norm != "layer_plain":
            shapes[f"{name}.weight"] = (H,)
        if arch.norm == "layer":
            shapes[f"{name}.bias"] = (H,)

    if arch.position == "learned":
        shapes[names.positions] = (arch.max_position, H)
    places = norm_places(arch)
    N, K = arch.num_heads, arch.num_kv_heads
    for i in range(arch.num_layers):
        prefix = names.layer.format(i)
        for place in places[:1]:
            norm(prefix + getattr(names, place))
        if arch.latent is None:
            linear([(names.q, N * D), (names.k, K * D), (names.v, K * D)], H, arch.qkv_bias)
        else:
            own, latent = names.latent, arch.latent
            if latent.query_rank is None:
                linear([(own.query, N * latent.query_dim)], H, False)
            else:
                linear([(own.query_down, latent.query_rank)], H, latent.down_bias)
                shapes[prefix + own.query_norm] = (latent.query_rank,)
                linear([(own.query_up, N * latent.query_dim)], latent.query_rank, False)
            linear([(own.down, latent.cached)], H, latent.down_bias)
            shapes[prefix + own.norm] = (latent.rank,)
            linear([(own.up, N * (latent.head_dim + latent.value_dim))], latent.rank, False)
        linear([(names.attention_out, H)], N * arch.value_dim, arch.attention_out_bias)
        if arch.qk_norm:
            is_whole = arch.qk_norm_over == "width"
            shapes[prefix + names.q_norm] = (N * D if is_whole else D,)
            shapes[prefix + names.k_norm] = (K * D if is_whole else D,)
        if arch.attention_sinks:
            shapes[prefix + names.sinks] = (N,)
        for place in places[1:]:
            norm(prefix + getattr(names, place))
        ffn = [(name, arch.ffn_size) for name in ((names.gate, names.up) if arch.gated_ffn else (names.up,))]
        if arch.experts is None or not arch.kind(i).experts:
            linear(ffn, H, arch.ffn_bias)
            linear([(names.down, H)], arch.ffn_size, arch.ffn_bias)
            continue
        experts = arch.experts
        linear([(names.router, experts.num_experts)], H, experts.router_bias)
        if experts.correction_bias:
            shapes[prefix + names.correction] = (experts.num_experts,)
        for e in range(experts.num_experts):
            if names.fused_experts:
                of = prefix + names.fused_experts
                shapes[f"{of}gate_up_proj[{e}]"] = (H, 2 * arch.expert_size)
                shapes[f"{of}gate_up_proj_bias[{e}]"] = (2 * arch.expert_size,)
                shapes[f"{of}down_proj[{e}]"], shapes[f"{of}down_proj_bias[{e}]"] = (arch.expert_size, H), (H,)
                continue
            gate, up, down = names.of_expert(e)
            linear([(gate, arch.expert_size), (up, arch.expert_size)], H, False)
            linear([(down, H)], arch.expert_size, False)
        if size := experts.shared_ffn_size:
            gate, up, down = names.of_shared
            linear([(gate, size), (up, size)], H, False)
            linear([(down, H)], size, False)
        if experts.shared_gate:
            shapes[prefix + names.shared_gate] = (1, H)
    norm(names.final_norm)
    if not arch.tie_embeddings:
        shapes[names.head] = (arch.vocab_size, H)
    if arch.head_bias:
        shapes[names.head_bias] = (arch.vocab_size,)
    return shapes


def norm_places(arch: Architecture) -> tuple[str, ...]:
    """Return which norms a layer has, as the fields of `Names` call them."""
    before, after = ("attention_norm", "ffn_norm"), ("attention_norm_after", "ffn_norm_after")
    places = {"before": before, "after": after, "both": before + after, "parallel": before, "shared": before[:1]}
    return places[arch.norms]


def expert_weights(names: Names, prefix: str, count: int) -> tuple[list[str], list[str]]:
    """Return the names of a layer's gate and up projections, of all its experts, and those of its down projections."""
    if names.fused_experts:
        of = prefix + names.fused_experts
        gate_up, down = ([f"{of}{part}[{e}]" for e in range(count)] for part in ("gate_up_proj", "down_proj"))
        return gate_up, down
    experts = [names.of_expert(e) for e in range(count)]
    gate_up = [prefix + weight_of(name) for own in experts for name in own[:2]]
    return gate_up, [prefix + weight_of(own[2]) for own in experts]


def linear_weights(arch: Architecture) -> dict[str, bool]:
    """Return the names of the embedding's, the linear layers' and the head's weights, and whether each is [in, out]."""
    names = names_of(arch)
    rows = {names.embedding, names.head}  # as torch has them in every family
    return {
        name: names.fused_experts != "" if name.endswith("]") else names.transposed and name not in rows
        for name, shape in tensor_shapes(arch).items()
        if len(shape) == 2 and name != names.positions
    }


def deciding_keys(arch: Architecture, name: str) -> str:
    """Return the keys of config.json on which it depends whether there is a tensor `name` and of what shape.

    It is found by changing each field of the architecture. The text goes at the end of an error.
    """

    def shape(arch: Architecture) -> tuple[int, ...] | None:
        for full, shape in tensor_shapes(arch).items():
            if full.endswith(name) or full.partition("[")[0].endswith(name):
                return shape
        return None

    last = max(map(int, re.findall(r"\.(\d+)\.", f".{name}")), default=0)
    keys: dict[str, None] = {}
    of_family = family_of(arch).keys
    for field, key in of_family.items():
        if field == "norms":
            continue
        try:
            changed = _with_another(arch, field, last)
        except ConfigError:
            continue
        if changed is not None and shape(changed) != shape(arch):
            keys[key] = None
    if not keys and "norms" in of_family:  # which norms there are, and what they are called
        keys[of_family["norms"]] = None
    return f" ({', '.join(keys)} in config.json)" if keys else ""


def _with_another(arch: Architecture, field: str, last: int) -> Architecture | None:
    """Return the architecture with another value of a field, or of one of its experts or its latent attention.

    `last` is a layer's number or an expert's, that there is or is not. None: the architecture has no such field.
    """
    of, _, inner = field.rpartition(".")
    part: Any = getattr(arch, of) if of else arch
    if part is None:
        return None
    if field == "layers":
        flipped = (replace(arch.kind(i), experts=not arch.kind(i).experts) for i in range(arch.num_layers))
        return replace(arch, layers=tuple(flipped))
    value = getattr(part, inner)
    other: Any = not value if isinstance(value, bool) else 2 * (value or 1)
    if inner in ("num_layers", "num_experts"):
        other = last if 0 < last < value else max(2 * value, last + 1)
    if inner == "num_kv_heads" and value == arch.num_heads:
        other = 1
    changes: dict[str, Any] = {inner: other} | ({"layers": ()} if field == "num_layers" else {})
    if of == "latent":
        latent = replace(part, **changes)
        changes = {of: latent, "head_dim": latent.cached}
    elif of:
        changes = {of: replace(part, **changes)}
    return replace(arch, **changes)
