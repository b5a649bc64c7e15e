"""Reads the measurements of Vidur (microsoft/vidur, MIT): CSV files, .gz or not, times in milliseconds.

The folder of a device (`a100`, `h100`) contains `mlp_MODEL`, `attention_*` (of FlashAttention),
`attention_flashinfer_*`, `dgx_all_reduce`, `dgx_send_recv`, `all_reduce_by_hidden_size`,
`send_intra_node_by_hidden_size` and `send_inter_node_by_hidden_size`. A missing file counts as empty. Times are
returned in seconds.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from .operator_tables import (
    ELEMENT,
    ChunkKernel,
    DecodeKernel,
    MatrixProduct,
    Message,
    OperatorTables,
    RowKernel,
)

T = TypeVar("T", bound=Any)  # a tuple with `seconds`
_FLASHINFER_HEADS = {"llama3-8b_tp1": (32, 8, 128)}  # of a rank: queries', keys', and their size


def read(folder: Path) -> OperatorTables:
    """Read all measurements of a device."""
    products, rows = [], []
    for model in models(folder):
        of_model = read_linear(folder, model)
        products += of_model[0]
        rows += of_model[1]
    chunks, decodes, copies = read_attention(folder)
    fi_chunks, fi_decodes = read_flashinfer(folder)
    return OperatorTables(
        products,
        rows + copies,
        _found(flash_attention=chunks, flashinfer=fi_chunks),
        _found(flash_attention=decodes, flashinfer=fi_decodes),
        all_reduce=read_all_reduce(folder),
        node=read_send(folder, between_nodes=False),
        network=read_send(folder, between_nodes=True),
    )


def _found(**by_kernels: Any) -> Any:
    """Return only libraries with measurements."""
    return {kernels: rows for kernels, rows in by_kernels.items() if rows}


def models(folder: Path) -> list[str]:
    """Return the models with measured linear operators."""
    return sorted(path.name.removeprefix("mlp_").split(".csv")[0] for path in folder.glob("mlp_*.csv*"))


def read_linear(folder: Path, model: str) -> tuple[list[MatrixProduct], list[RowKernel]]:
    """Read the GEMMs and the row-wise kernels of one model."""
    products, rows = [], []
    for line in _lines(folder, f"mlp_{model}"):
        H, heads, kv_heads, ffn, tp, tokens = (
            int(line[key])
            for key in ("n_embd", "n_head", "n_kv_head", "n_expanded_embd", "num_tensor_parallel_workers", "num_tokens")
        )
        D, gate = H // heads, 2 if line["use_gated_mlp"] == "True" else 1
        N, K, F = heads // tp, max(1, kv_heads // tp), ffn // tp
        shapes = {
            "attn_pre_proj": ("preproj", H, (N + 2 * K) * D),
            "attn_post_proj": ("postproj", N * D, H),
            "mlp_up_proj": ("ffn_ln1", H, gate * F),
            "mlp_down_proj": ("ffn_ln2", F, H),
        }
        for column, (name, inputs, outputs) in shapes.items():
            if (seconds := _median(line, column)) is not None:
                products.append(MatrixProduct(model, H, name, tp, tokens, inputs, outputs, seconds))
        kernels = {
            "emb": ("embedding", 0, 2 * H),
            "input_layernorm": ("norm", H, 2 * H),
            "post_attention_layernorm": ("norm", H, 2 * H),
            "attn_rope": ("rope", (N + K) * D, 2 * (N + K) * D),
            "mlp_act": ("activation", gate * F, (gate + 1) * F),
            "add": ("add", 0, 3 * H),
        }
        for column, (name, width, moved) in kernels.items():
            if (seconds := _median(line, column)) is not None:
                rows.append(RowKernel(model, name, tp, tokens, width, moved * ELEMENT, seconds))
    return _medians(products), _medians(rows)


def read_flashinfer(folder: Path) -> tuple[list[ChunkKernel], list[DecodeKernel]]:
    """Read FlashInfer attention of chunks and of decodes. The files are of one model each and lack its sizes."""
    chunks, decodes = [], []
    for path in sorted(folder.glob("attention_flashinfer_*.csv*")):
        name = path.name.split(".csv")[0]
        heads = _FLASHINFER_HEADS[name.removeprefix("attention_flashinfer_")]
        for line in _lines(folder, name):
            cached, seconds = int(line["kv_before"]), float(line["median_ms"]) / 1e3
            if line["kind"] == "prefill":
                chunks.append(ChunkKernel(*heads, int(line["chunk"]), cached, seconds))
            else:
                decodes.append(DecodeKernel(*heads, int(line["batch_size"]), cached, seconds))
    return chunks, decodes


def read_attention(folder: Path) -> tuple[list[ChunkKernel], list[DecodeKernel], list[RowKernel]]:
    """Read FlashAttention of chunks and of decodes, and the copies of its outputs; heads are per rank."""
    chunks, decodes, copies = [], [], []
    for path in sorted(folder.glob("attention_*.csv*")):
        if "_flashinfer_" in path.name:
            continue
        for line in _lines(folder, path.name.split(".csv")[0]):
            tp, q_heads = int(line["num_tensor_parallel_workers"]), int(line["n_q_head"])
            heads = (q_heads // tp, max(1, int(line["n_kv_head"]) // tp), int(line["n_embd"]) // q_heads)
            cached, is_chunk = int(line["kv_cache_size"]), line["is_prefill"] == "True"
            if (seconds := _median(line, "attn_output_reshape")) is not None:
                tokens, moved = int(line["prefill_chunk_size" if is_chunk else "batch_size"]), 2 * heads[0] * heads[2]
                copies.append(RowKernel("", "copy", tp, tokens, 0, moved * ELEMENT, seconds))
            seconds = _median(line, "attn_prefill" if is_chunk else "attn_decode")
            if seconds is not None and is_chunk:
                chunks.append(ChunkKernel(*heads, int(line["prefill_chunk_size"]), cached, seconds))
            elif seconds is not None:
                decodes.append(DecodeKernel(*heads, int(line["batch_size"]), cached, seconds))
    return _medians(chunks), _medians(decodes), _medians(copies)


def read_all_reduce(folder: Path) -> dict[str, list[Message]]:
    """Read intra-node all-reduces, by file."""
    found = {
        "dgx_all_reduce": (
            (int(line["num_workers"]), int(line["size"]), line)
            for line in _lines(folder, "dgx_all_reduce")
            if line["num_workers"] == line["devices_per_node"]
        ),
        "all_reduce_by_hidden_size": (
            (int(line["num_workers"]), int(line["n_embd"]) * int(line["num_tokens"]) * ELEMENT, line)
            for line in _lines(folder, "all_reduce_by_hidden_size")
        ),
    }
    return _messages(found, "all_reduce")


def read_send(folder: Path, *, between_nodes: bool) -> dict[str, list[Message]]:
    """Read sends between ranks, by file. Each tensor-parallel rank sends its shard of the hidden states."""
    name = f"send_{'inter' if between_nodes else 'intra'}_node_by_hidden_size"
    found = {
        "dgx_send_recv": (
            (1, int(line["size"]), line)
            for line in _lines(folder, "dgx_send_recv")
            if (line["devices_per_node"] == "1") is between_nodes
        ),
        name: (
            (1, hidden * int(line["num_tokens"]) * ELEMENT // int(line["num_tensor_parallel_workers"]), line)
            for line in _lines(folder, name)
            for hidden in (int(line["n_embd"]),)
        ),
    }
    return _messages(found, "send_recv")


def _messages(found: Mapping[str, Iterable[tuple[int, int, dict[str, str]]]], column: str) -> dict[str, list[Message]]:
    by_file = {}
    for name, lines in found.items():
        timed = [
            Message(ranks, size, seconds)
            for ranks, size, line in lines
            if size > 0 and (seconds := _median(line, column)) is not None
        ]
        if timed:
            by_file[name] = _medians(timed)
    return by_file


def _lines(folder: Path, name: str) -> Iterator[dict[str, str]]:
    for path in (folder / f"{name}.csv.gz", folder / f"{name}.csv"):
        if path.is_file():
            data = path.read_bytes()
            text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
            yield from csv.DictReader(text.splitlines())
            return


def _median(line: dict[str, str], column: str) -> float | None:
    text = line.get(f"time_stats.{column}.median")
    return float(text) * 1e-3 if text else None


def _medians(timed: Iterable[T]) -> list[T]:
    """Merge repeated measurements (one per rank or run) into their median."""
    found = defaultdict(list)
    for each in timed:
        found[each._replace(seconds=0.0)].append(each.seconds)
    return [key._replace(seconds=median(seconds)) for key, seconds in found.items()]
