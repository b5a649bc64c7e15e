"""Converts the matrices of a GGUF file to another type, with the package `gguf`."""

from __future__ import annotations

from pathlib import Path

import gguf

_FILE_TYPE = "general.file_type"


def requantize(source: Path, kind: gguf.GGMLQuantizationType, target: Path) -> Path:
    """Write a copy of `source` with its matrices quantized (round to nearest) to `kind`."""
    found = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, found.fields["general.architecture"].contents())
    for name, field in found.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", _FILE_TYPE):
            continue
        element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{kind.name}"))
    for tensor in found.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
