"""The names and shapes of a checkpoint's tensors, by model family. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..conf.architecture import Architecture, LayerKind
from ..conf.errors import ConfigError, nearest
from ..conf.experts import ExpertsConfig
from ..conf.latent import LatentConfig
from .families import FAMILIES
from .families.family import Family
from .names import Names, weight_of

Shapes = dict[str, tuple[int, ...]]  # by tensor name


def names_of(arch: Architecture) -> Names:
    """Return the tensor names of the architecture's family."""
    return family_of(arch).names


def family_of(arch: Architecture) -> Family:
    """Return the architecture's family.

    Raises:
        ConfigError: the family is unknown.
    """
    if arch.family not in FAMILIES:
        raise ConfigError(f"model.architecture.family={arch.family}: unknown{nearest(arch.family, FAMILIES)}")
    return FAMILIES[arch.family]


def tensor_shapes(arch: Architecture, names: Names | None = None) -> Shapes:
    """Return the shape of every tensor in a checkpoint of `arch`, by name; `names` defaults to `names_of(arch)`."""
    names, V, H = names or names_of(arch), arch.vocab_size, arch.hidden_size
    shapes: Shapes = {names.embedding: (V, H)}
    if arch.position == "learned":
        shapes[names.positions] = (arch.max_position, H)
    for i in range(arch.num_layers):
        prefix = names.layer.format(i)
        shapes |= {prefix + name: shape for name, shape in _layer(arch, arch.kind(i), names).items()}
    shapes |= _norm(arch, names.final_norm)
    if not arch.tie_embeddings:
        shapes[names.head] = (V, H)
    if arch.head_bias:
        shapes[names.head_bias] = (V,)
    return shapes


def _layer(arch: Architecture, kind: LayerKind, names: Names) -> Shapes:
    """Return the tensors of a layer, without its prefix."""
    first, *others = (getattr(names, place) for place in norm_places(arch))
    out = [(names.attention_out, arch.hidden_size)]
    return {
        **_norm(arch, first),
        **(_attention(arch, names) if arch.latent is None else _latent_attention(arch, arch.latent, names)),
        **_linear(names, out, arch.num_heads * arch.value_dim, arch.attention_out_bias),
        **_head_norms(arch, names),
        **({names.sinks: (arch.num_heads,)} if arch.attention_sinks else {}),
        **{name: shape for each in others for name, shape in _norm(arch, each).items()},
        **(_ffn(arch, names) if arch.experts is None or not kind.experts else _experts(arch, arch.experts, names)),
    }


def _linear(names: Names, parts: Sequence[tuple[str, int]], in_size: int, bias: bool = False) -> Shapes:
    """Return the weights of linear layers given as (name, outputs); parts with the same name form one tensor."""
    widths, shapes = dict[str, int](), Shapes()
    for name, out_size in parts:
        widths[name] = widths.get(name, 0) + out_size
    for name, out_size in widths.items():
        shapes[weight_of(name)] = (in_size, out_size) if names.transposed else (out_size, in_size)
        if bias:
            shapes[f"{name}.bias"] = (out_size,)
    return shapes


def _norm(arch: Architecture, name: str) -> Shapes:
    parts = {"rms": ("weight",), "layer": ("weight", "bias"), "layer_scale": ("weight",), "layer_plain": ()}[arch.norm]
    return {f"{name}.{part}": (arch.hidden_size,) for part in parts}


def _attention(arch: Architecture, names: Names) -> Shapes:
    queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    parts = [(names.q, queries), (names.k, keys), (names.v, keys)]
    return _linear(names, parts, arch.hidden_size, arch.qkv_bias)


def _latent_attention(arch: Architecture, latent: LatentConfig, names: Names) -> Shapes:
    own, N, H, rank = names.latent, arch.num_heads, arch.hidden_size, latent.query_rank
    if rank is None:
        queries = _linear(names, [(own.query, N * latent.query_dim)], H)
    else:
        queries = {
            **_linear(names, [(own.query_down, rank)], H, latent.down_bias),
            own.query_norm: (rank,),
            **_linear(names, [(own.query_up, N * latent.query_dim)], rank),
        }
    return {
        **queries,
        **_linear(names, [(own.down, latent.cached)], H, latent.down_bias),
        own.norm: (latent.rank,),
        **_linear(names, [(own.up, N * (latent.head_dim + latent.value_dim))], latent.rank),
    }


def _head_norms(arch: Architecture, names: Names) -> Shapes:
    if not arch.qk_norm:
        return {}
    queries, keys = (arch.num_heads, arch.num_kv_heads) if arch.qk_norm_over == "width" else (1, 1)
    return {names.q_norm: (queries * arch.head_dim,), names.k_norm: (keys * arch.head_dim,)}


def _ffn(arch: Architecture, names: Names) -> Shapes:
    inner = [(name, arch.ffn_size) for name in ((names.gate, names.up) if arch.gated_ffn else (names.up,))]
    return {
        **_linear(names, inner, arch.hidden_size, arch.ffn_bias),
        **_linear(names, [(names.down, arch.hidden_size)], arch.ffn_size, arch.ffn_bias),
    }


def _experts(arch: Architecture, experts: ExpertsConfig, names: Names) -> Shapes:
    H, E = arch.hidden_size, experts.num_experts
    shapes = _linear(names, [(names.router, E)], H, experts.router_bias)
    if experts.correction_bias:
        shapes[names.correction] = (E,)
    for e in range(E):
        if names.fused_experts:
            shapes |= _fused_expert(names.fused_experts, e, H, arch.expert_size)
        else:
            shapes |= _expert(names, names.of_expert(e), H, arch.expert_size)
    if experts.shared_ffn_size:
        shapes |= _expert(names, names.of_shared, H, experts.shared_ffn_size)
    if experts.shared_gate:
        shapes[names.shared_gate] = (1, H)
    return shapes


def _expert(names: Names, own: tuple[str, str, str], H: int, size: int) -> Shapes:
    gate, up, down = own
    return {**_linear(names, [(gate, size), (up, size)], H), **_linear(names, [(down, H)], size)}


def _fused_expert(of: str, e: int, H: int, size: int) -> Shapes:
    return {
        f"{of}gate_up_proj[{e}]": (H, 2 * size),
        f"{of}gate_up_proj_bias[{e}]": (2 * size,),
        f"{of}down_proj[{e}]": (size, H),
        f"{of}down_proj_bias[{e}]": (H,),
    }


def norm_places(arch: Architecture) -> tuple[str, ...]:
    """Return the norms of a layer, as field names of `Names`."""
    before, after = ("attention_norm", "ffn_norm"), ("attention_norm_after", "ffn_norm_after")
    places = {"before": before, "after": after, "both": before + after, "parallel": before, "shared": before[:1]}
    return places[arch.norms]


def expert_weights(names: Names, prefix: str, count: int) -> tuple[list[str], list[str]]:
    """Return the tensor names of a layer's expert gate and up projections, and of its expert down projections."""
    if names.fused_experts:
        of = prefix + names.fused_experts
        gate_up, down = ([f"{of}{part}[{e}]" for e in range(count)] for part in ("gate_up_proj", "down_proj"))
        return gate_up, down
    experts = [names.of_expert(e) for e in range(count)]
    gate_up = [prefix + weight_of(name) for own in experts for name in own[:2]]
    return gate_up, [prefix + weight_of(own[2]) for own in experts]


def linear_weights(arch: Architecture) -> dict[str, bool]:
    """Map the weight names of the embedding, linear layers and head to whether each is [in, out]."""
    names = names_of(arch)
    rows = {names.embedding, names.head}  # [out, in] in every family
    return {
        name: names.fused_experts != "" if name.endswith("]") else names.transposed and name not in rows
        for name, shape in tensor_shapes(arch).items()
        if len(shape) == 2 and name != names.positions
    }


def deciding_keys(arch: Architecture, name: str) -> str:
    """Return the keys of config.json that determine whether a tensor `name` exists and its shape.

    Found by changing each field of the architecture. The text is appended to an error.
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
    if not keys and "norms" in of_family:  # determines the set of norms and their names
        keys[of_family["norms"]] = None
    return f" ({', '.join(keys)} in config.json)" if keys else ""


def _with_another(arch: Architecture, field: str, last: int) -> Architecture | None:
    """Return the architecture with one field changed, possibly a field of its experts or MLA.

    `last` is the index of a layer or expert in the tensor's name. None: the architecture has no such field.
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
