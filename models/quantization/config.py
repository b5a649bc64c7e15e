"""Reads a folder's quantization config: `quantization_config` in config.json, or an older tool's file.

Unsupported settings are rejected by name. This file imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from ...conf.errors import ConfigError
from ..json_file import read_object
from ..model_config import ModelValues
from .compressed_tensors import check_patterns, read_compressed_tensors
from .schemes import Awq, Bytes, Gptq, Mxfp4Blocks, Scheme, SchemeOf, is_embedding

_OF_GPTQ, _OF_AWQ = "quantize_config.json", "quant_config.json"  # if config.json has no quantization_config
_OF_MODELOPT = "hf_quant_config.json"
_HEAD = "lm_head"
_RENAMED = {"w_bit": "bits", "q_group_size": "group_size"}  # in AutoAWQ's own file


def read_quantization(config: ModelValues) -> SchemeOf | None:
    """Return how each linear layer's weight is stored; None if no weights are quantized.

    Args:
        config: config.json, whose folder may contain an older tool's file.

    Raises:
        ConfigError: the method, or a feature of it, is not supported.
    """
    if config.get("quantization_config") is not None:
        values = config.part("quantization_config")
        method = str(values.get("quant_method", values.get("quant_type", "")))
    else:
        folder = config.path.parent
        name = next((name for name in (_OF_GPTQ, _OF_AWQ, _OF_MODELOPT) if (folder / name).is_file()), None)
        if name is None:
            return None
        if name == _OF_MODELOPT:
            raise ConfigError(f"{folder / name}: weights quantized by ModelOpt are not supported{_supported()}")
        own = {_RENAMED.get(key, key): value for key, value in read_object(folder / name).items()}
        values = ModelValues(folder / name, own)
        method = str(values.get("quant_method", "gptq" if name == _OF_GPTQ else "awq"))
    if method not in _READERS:
        raise ConfigError(f"{values.path}: {values.within}quant_method={method!r} is not supported{_supported()}")
    if method == "mxfp4" and config.get("model_type") != "gpt_oss":
        raise ConfigError(f"{values.path}: {values.within}quant_method='mxfp4' is not supported outside of gpt-oss")
    return _READERS[method](values)


def _supported() -> str:
    return f"; supported: {', '.join(_READERS)}, and GGUF files"


def _gptq(values: ModelValues) -> SchemeOf:
    if values.get("is_marlin_format", False):
        raise values.unsupported("is_marlin_format")
    stored = str(values.get("checkpoint_format", values.get("format", "gptq"))).lower()
    if stored not in ("gptq", "gptq_v2"):
        raise values.wrong(values.first("checkpoint_format", "format"), "gptq or gptq_v2")
    of_block = values.get("modules_in_block_to_quantize")
    block = None if of_block is None else [str(name) for names in of_block for name in _listed(names)]
    takes_head = values.flag("lm_head", False)
    rules = values.part("dynamic").values
    check_patterns(values, "dynamic", [_bare(rule) for rule in rules])

    def is_left(name: str) -> bool:
        if name == _HEAD or is_embedding(name):
            return is_embedding(name) or not takes_head
        return block is not None and not name.endswith(tuple(block))

    def scheme(name: str) -> Scheme | None:
        if is_left(name):
            return None
        own = dict(values.values)
        for pattern, changes in rules.items():  # GPTQModel: `-:` leaves a layer unquantized; others override keys
            if re.match(_bare(pattern), name):
                if pattern.startswith("-:"):
                    return None
                own |= changes if isinstance(changes, dict) else {}
                break
        return _gptq_scheme(ModelValues(values.path, own, values.within), 1 if stored == "gptq" else 0)

    _gptq_scheme(values, 1)  # raises errors early
    return scheme


def _bare(rule: str) -> str:
    return rule.removeprefix("+:").removeprefix("-:")


def _gptq_scheme(values: ModelValues, zero_shift: int) -> Gptq:
    bits = values.integer("bits")
    if bits not in (4, 8):
        raise values.wrong("bits", "4 or 8")
    group = _group(values)
    ordered = group is not None and values.flag("desc_act", False)
    symmetric = values.flag("sym", True)
    return Gptq(bits=bits, group=group, is_symmetric=symmetric, needs_order=ordered, zero_shift=zero_shift)


def _group(values: ModelValues) -> int | None:
    return None if values.integer("group_size", 128) == -1 else values.positive("group_size", 128)


def _listed(names: object) -> list[object]:
    return names if isinstance(names, list) else [names]


def _awq(values: ModelValues) -> SchemeOf:
    if (version := str(values.get("version", values.get("format", "gemm"))).lower()) != "gemm":
        raise values.unsupported(f"{values.within}version={version} (supported: gemm)")
    if values.integer("bits", 4) != 4:
        raise values.wrong("bits", "4")
    if not values.flag("zero_point", True):
        raise values.wrong("zero_point", "true")
    kept, awq = values.names("modules_to_not_convert"), Awq(group=_group(values))
    return lambda name: None if _is_outer(name) or any(each in name for each in kept) else awq


def _fp8(values: ModelValues) -> SchemeOf:
    sizes = values.get("weight_block_size")
    if sizes is not None and (not isinstance(sizes, list) or len(sizes) != 2 or min(map(_size, sizes)) < 1):
        raise values.wrong("weight_block_size", "two sizes, or null for a scale a tensor")
    if (kind := str(values.get("fmt", "e4m3"))) != "e4m3":
        raise values.unsupported(f"{values.within}fmt={kind}")
    stored = Bytes(True, "tensor", scale="weight_scale_inv")
    if sizes is not None:
        stored = replace(stored, extent="block", block=(sizes[0], sizes[1]))
    kept = [*values.names("modules_to_not_convert"), *values.names("ignored_layers")]
    check_patterns(values, "modules_to_not_convert", kept)

    def is_kept(name: str) -> bool:
        """Match like transformers: by name, prefix up to a dot, suffix, or regex."""
        return any(re.match(rf"(?:{each})(?:(?<=\.)|(?=\.|$))", name) or name.endswith(each) for each in kept)

    return lambda name: None if _is_outer(name) or is_kept(name) else stored


def _is_outer(name: str) -> bool:
    return name == _HEAD or is_embedding(name)


def _size(value: object) -> int:
    return value if type(value) is int else 0


def _mxfp4(values: ModelValues) -> SchemeOf:
    """Return the scheme of gpt-oss's experts, which share one tensor."""
    return lambda name: Mxfp4Blocks() if name.endswith("]") else None


_READERS: dict[str, Callable[[ModelValues], SchemeOf]] = {
    "compressed-tensors": read_compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
