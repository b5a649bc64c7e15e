"""Reads published operator tables: aiconfigurator's (ai-dynamo/aiconfigurator, Apache-2.0).

Its folder for a device and an engine contains `gemm_perf`, `context_attention_perf`, `generation_attention_perf`,
`moe_perf`, `custom_allreduce_perf` and `nccl_perf`, as CSV text or parquet, with `latency` in milliseconds. A copy with
fewer columns contains `GPU_gemm`, `GPU_context_attention`, `GPU_generation_attention`, `GPU_moe` and `GPU_collectives`
as CSV, with `latency_us` in microseconds. Files may be gzipped and in subfolders.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from gapless.conf.costs import AttentionKernels
from gapless.conf.errors import ConfigError

from .operator_tables import ChunkKernel, DecodeKernel, ExpertLayer, MatrixProduct, Message, OperatorTables

TABLES = {  # file names in aiconfigurator and in the copy
    "products": ("gemm_perf", "gemm"),
    "chunks": ("context_attention_perf", "context_attention"),
    "decodes": ("generation_attention_perf", "generation_attention"),
    "experts": ("moe_perf", "moe"),
    "own": ("custom_allreduce_perf", "collectives"),
    "library": ("nccl_perf", "collectives"),
}
RATES = {"fp8": "fp8_rate", "fp8_block": "fp8_block_rate"}
_SUFFIXES = (".txt", ".csv", ".parquet", ".txt.gz", ".csv.gz")
_LEAST_SIDE = 256  # minimum inputs and outputs of a GEMM in a model's layer
_MOST_ROWS = 8192
_LEAST_BLOCK_FLOP = 1e11  # below it, times of block-scaled GEMMs include the host's launch
_LEAST_TOKENS = 64  # of a prompt
_LEAST_CONTEXT, _MOST_REQUESTS = 256, 256  # of decodes; others do not occur in engines
_HEAD_DIM = 128
_Line = Mapping[str, Any]


def read_published(folder: Path, kernels: AttentionKernels, device: str = "") -> OperatorTables:
    """Read the tables of one device.

    Args:
        folder: of the tables.
        kernels: the library that computed attention.
        device: prefix of the copy's file names; empty: any.

    Raises:
        ConfigError: no tables, several of one kind, or one that is damaged.
    """
    found = OperatorTables()
    files = {name: _file(folder, *names, device) for name, names in TABLES.items()}
    if not any(files.values()):
        raise ConfigError(f"{folder}: contains no table; aiconfigurator's are named {TABLES['products'][0]}.txt, say")

    def read(name: str, parse: Callable[[_Line], Any]) -> Iterator[Any]:
        path = files[name]
        if path is None:
            return
        times = defaultdict(list)
        try:
            for line in _lines(path):
                if (row := parse(line)) is not None:
                    us = line.get("latency_us") or 1e3 * float(line["latency"])
                    times[row].append(float(us) * 1e-6)
        except (OSError, KeyError, TypeError, ValueError, csv.Error, EOFError) as error:
            raise ConfigError(f"{path}: not a table of {name} ({type(error).__name__}: {error})") from None
        for row, seconds in times.items():
            if fmean(seconds) > 0:
                yield row._replace(seconds=fmean(seconds)) if hasattr(row, "_replace") else (*row, fmean(seconds))

    for dtype, *sizes, seconds in read("products", _product):
        rows, inputs, outputs = sizes
        product = MatrixProduct("", 0, dtype, 1, rows, inputs, outputs, seconds)
        if dtype == "bfloat16":
            found.products.append(product)
        elif dtype in RATES and (dtype != "fp8_block" or 2 * math.prod(sizes) >= _LEAST_BLOCK_FLOP):
            found.quantized.setdefault(RATES[dtype], []).append(product)
    if chunks := list(read("chunks", _chunk)):
        found.chunks[kernels] = chunks
    if decodes := list(read("decodes", _decodes)):
        found.decodes[kernels] = decodes
    found.experts.extend(read("experts", _experts))
    for name, table in (("graph_all_reduce", "own"), ("all_reduce", "library")):
        if messages := list(read(table, _own if table == "own" else _library)):
            getattr(found, name)[TABLES[table][0]] = messages
    return found


def _file(folder: Path, name: str, copy: str, device: str) -> Path | None:
    """Find the file of a table, by either of its names."""
    wanted = [f"{stem}{suffix}" for stem in (name, f"{device or '*'}_{copy}") for suffix in _SUFFIXES]
    paths = sorted({path for pattern in wanted for path in folder.rglob(pattern)})
    if len(paths) > 1:
        raise ConfigError(f"{folder}: several tables {name}, {paths[0]} and {paths[1]}; give the folder of one")
    return paths[0] if paths else None


def _lines(path: Path) -> Iterator[_Line]:
    """Yield the rows of a table."""
    if path.suffix == ".parquet":
        try:
            import polars
        except ImportError:
            raise ConfigError(f"{path}: parquet needs polars: pip install polars") from None
        yield from polars.read_parquet(path).iter_rows(named=True)
        return
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    if text.startswith("version https://git-lfs"):
        raise ConfigError(f"{path}: a Git LFS pointer, not the table; fetch it with git lfs pull")
    yield from csv.DictReader(io.StringIO(text))


def _product(line: _Line) -> tuple[str, int, int, int] | None:
    rows, outputs, inputs = (int(line[key]) for key in "mnk")
    if min(inputs, outputs) < _LEAST_SIDE or rows > _MOST_ROWS:
        return None
    dtype = str(line["gemm_dtype"])
    return "bfloat16" if dtype == "float16" else dtype, rows, inputs, outputs


def _heads(line: _Line) -> tuple[int, int, int] | None:
    """Return the sizes of attention; None unless it is half precision, without a window and with head size 128."""
    plain = line["kv_cache_dtype"] in ("bfloat16", "float16") and int(line.get("window_size") or 0) <= 0
    if not plain or int(line.get("head_dim") or _HEAD_DIM) != _HEAD_DIM:
        return None
    heads, kv_heads = int(line["num_heads"]), int(line["num_key_value_heads"])
    return heads, kv_heads or heads, _HEAD_DIM


def _chunk(line: _Line) -> ChunkKernel | None:
    heads, length = _heads(line), int(line["isl"])
    if heads is None or length < _LEAST_TOKENS:
        return None
    return ChunkKernel(*heads, length, int(line.get("step") or 0), 0.0, int(line["batch_size"]))


def _decodes(line: _Line) -> DecodeKernel | None:
    heads, requests, context = _heads(line), int(line["batch_size"]), int(line.get("isl") or 1) + int(line["step"])
    if heads is None or requests > _MOST_REQUESTS or context < _LEAST_CONTEXT:
        return None
    return DecodeKernel(*heads, requests, context, 0.0)


def _experts(line: _Line) -> ExpertLayer | None:
    even = line["distribution"] in ("balanced", "uniform")
    if line["moe_dtype"] not in ("bfloat16", "float16") or int(line["moe_ep_size"]) > 1 or not even:
        return None
    width = int(line["inter_size"]) // int(line["moe_tp_size"])
    experts, picked, rows = (int(line[key]) for key in ("num_experts", "topk", "num_tokens"))
    return ExpertLayer(int(line["hidden_size"]), width, experts, picked, rows, 0.0)


def _own(line: _Line) -> Message | None:
    """Return an all-reduce by an engine's kernel in a CUDA graph; None for others."""
    by = str(line.get("by") or line.get("kernel_source"))
    return None if "eager" in by or "nccl" in by.lower() else _message(line)


def _library(line: _Line) -> Message | None:
    """Return an all-reduce by NCCL; None for others."""
    if (line.get("op") or line.get("op_name")) != "all_reduce" or line.get("by", "nccl") != "nccl":
        return None
    return _message(line)


def _message(line: _Line) -> Message | None:
    """Return an all-reduce. aiconfigurator's tables give its two-byte elements, the copy its bytes."""
    if line.get("op", "all_reduce") != "all_reduce":
        return None
    size = int(line["bytes"]) if "bytes" in line else 2 * int(line["message_size"])
    return Message(int(line["num_gpus"]), size, 0.0)
