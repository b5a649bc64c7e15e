"""Reads a `quantization_config` of compressed-tensors. Imports no torch.

Weights are used as stored. With INT8 weights per channel or tensor, 8-bit activations are quantized dynamically per
token; their static scales, which are less accurate, and zero points are ignored. Other activations stay unquantized.
"""

from __future__ import annotations

import re

from ..model_config import ModelValues
from .schemes import Bytes, Extent, Mxfp4, Packed, Scheme, SchemeOf, is_embedding

_PACKED, _MXFP4 = "pack-quantized", "mxfp4-pack-quantized"
_BYTES = ("int-quantized", "float-quantized", "naive-quantized")
_FORMATS = (_PACKED, *_BYTES, _MXFP4)
_CLASSES = ("Linear", "Embedding")
_EXTENTS: tuple[Extent, ...] = ("tensor", "channel", "group", "block")


def read_compressed_tensors(values: ModelValues) -> SchemeOf:
    """Return how each linear layer's weight is stored. Targets match by name first, then by regex, then by class.

    Raises:
        ConfigError: a group's format or type is not supported, or there is sparsity or a KV-cache scheme.
    """
    if values.get("kv_cache_scheme") is not None:
        raise values.unsupported(f"{values.within}kv_cache_scheme")
    sparsity = values.part("sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise values.unsupported(f"{values.within}sparsity_config (format={sparsity})")
    if values.part("transform_config").get("config_groups"):
        raise values.unsupported(f"{values.within}transform_config")
    status = values.get("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise values.wrong("quantization_status", "compressed")
    ignored = values.names("ignore")
    groups = values.part("config_groups")
    by_target: dict[str, Scheme] = {}
    for name in groups.values:
        group = groups.part(name)
        scheme = _scheme(group, str(group.get("format", values.get("format"))))
        by_target |= dict.fromkeys(group.names("targets"), scheme)
    if not by_target:
        raise values.wrong("config_groups", "groups with targets")
    for key, names in (("ignore", ignored), ("config_groups", list(by_target))):
        check_patterns(values, key, [name.removeprefix("re:") for name in names if name.startswith("re:")])
    ordered = sorted(by_target, key=lambda target: (target in _CLASSES, "re:" in target, target))

    def of(name: str) -> Scheme | None:
        if any(_matches(name, each) for each in ignored):
            return None
        return next((by_target[each] for each in ordered if _matches(name, each)), None)

    return of


def check_patterns(values: ModelValues, key: str, patterns: list[str]) -> None:
    """Check that each pattern is a valid regex.

    Raises:
        ConfigError: one is not.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise values.unsupported(f"{values.within}{key}: the expression {pattern!r} ({error})") from error


def _matches(name: str, target: str) -> bool:
    """Return whether a target matches a layer: by its name, its class, or a regex after `re:`."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target in (name, "Embedding" if is_embedding(name) else "Linear")


def _scheme(group: ModelValues, stored: str) -> Scheme:
    if stored not in _FORMATS:
        raise group.unsupported(f"{group.within}format={stored} (supported: {', '.join(_FORMATS)})")
    weights, inputs = group.part("weights"), group.part("input_activations")
    if group.get("output_activations") is not None:
        raise group.unsupported(f"{group.within}output_activations")
    bits, kind = weights.integer("num_bits"), str(weights.get("type", "int"))
    size = weights.get("group_size")
    has_groups = size not in (None, -1)
    default = "group" if has_groups else "tensor" if size is None else "channel"
    extent = str(weights.get("strategy", default))
    if extent not in _EXTENTS:
        raise weights.wrong("strategy", f"one of {', '.join(_EXTENTS)}")
    symmetric = weights.flag("symmetric", True)
    allowed = {_PACKED: ((4, "int"), (8, "int")), _MXFP4: ((4, "float"),)}.get(stored, ((8, "int"), (8, "float")))
    if (bits, kind) not in allowed or (kind == "float" and not symmetric):
        raise weights.unsupported(f"{weights.within}num_bits={bits}, type={kind}, symmetric={symmetric} in {stored}")
    if stored == _MXFP4:
        if weights.integer("group_size", 32) != 32:
            raise weights.wrong("group_size", "32")
        return Mxfp4()
    group_size = weights.positive("group_size") if extent == "group" else None
    if stored == _PACKED:
        if extent not in ("group", "channel"):
            raise weights.wrong("strategy", "group or channel")
        ordered = weights.get("actorder") in ("group", "dynamic")
        return Packed(bits=bits, group=group_size, is_symmetric=symmetric, needs_order=ordered)
    block = (1, group_size or 1)
    if extent == "block":
        sizes = weights.get("block_structure", [128, 128])
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
            raise weights.wrong("block_structure", "two sizes")
        block = (sizes[0], sizes[1])
    rounds = kind == "int" and inputs.get("num_bits") == 8 and inputs.get("type", "int") == "int"
    by_row = extent in ("tensor", "channel")  # scales that an integer GEMM can apply after accumulating
    return Bytes(
        kind == "float", extent, block, is_symmetric=symmetric, int8_activations=rounds and by_row and symmetric
    )
