"""Times of single operators on one device, as in published tables."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from gapless.conf.costs import AttentionKernels

ELEMENT = 2  # bytes: half precision, except for quantized weights


class MatrixProduct(NamedTuple):
    """A GEMM: [rows, inputs] x [inputs, outputs]."""

    model: str
    hidden: int  # the model's hidden size; measurements of each have the same weight in a fit
    operator: str
    tp: int
    rows: int
    inputs: int
    outputs: int
    seconds: float


class RowKernel(NamedTuple):
    """A row-wise kernel of `width` elements per row, which reads and writes `moved` bytes per row."""

    model: str
    operator: str
    tp: int
    rows: int
    width: int
    moved: int
    seconds: float


class ChunkKernel(NamedTuple):
    """Attention of `prompts` chunks of `length` tokens, each over itself and a prefix of `prefix` tokens."""

    heads: int
    kv_heads: int
    head_dim: int
    length: int
    prefix: int
    seconds: float
    prompts: int = 1


class DecodeKernel(NamedTuple):
    """Attention of `requests` decodes, each over `context` tokens."""

    heads: int
    kv_heads: int
    head_dim: int
    requests: int
    context: int
    seconds: float


class ExpertLayer(NamedTuple):
    """The experts of an MoE layer for `rows` evenly routed tokens: both grouped GEMMs, activation and routing."""

    hidden: int
    width: int  # an expert's FFN size on the rank
    experts: int
    picked: int
    rows: int
    seconds: float


class Message(NamedTuple):
    """A message of `size` bytes from one rank (`ranks` is 1), or an all-reduce of `size` bytes among `ranks`."""

    ranks: int
    size: int
    seconds: float


@dataclass(frozen=True)
class OperatorTables:
    """All measurements of a device.

    Attributes:
        chunks, decodes: attention, by the library that computed it.
        experts: MoE layers in bfloat16.
        quantized: GEMMs with 8-bit weights, by the constant of their rate, such as `fp8_rate`.
        all_reduce, graph_all_reduce, node, network: messages by file.
    """

    products: list[MatrixProduct] = field(default_factory=list)
    rows: list[RowKernel] = field(default_factory=list)
    chunks: dict[AttentionKernels, list[ChunkKernel]] = field(default_factory=dict)
    decodes: dict[AttentionKernels, list[DecodeKernel]] = field(default_factory=dict)
    all_reduce: dict[str, list[Message]] = field(default_factory=dict)
    graph_all_reduce: dict[str, list[Message]] = field(default_factory=dict)
    node: dict[str, list[Message]] = field(default_factory=dict)
    network: dict[str, list[Message]] = field(default_factory=dict)
    quantized: dict[str, list[MatrixProduct]] = field(default_factory=dict)
    experts: list[ExpertLayer] = field(default_factory=list)

    @property
    def are_any(self) -> bool:
        """Whether there are measurements."""
        return any(getattr(self, each.name) for each in fields(self))

    def split(self) -> tuple[OperatorTables, OperatorTables]:
        """Split off every third token count, size or context; returns the kept and the held-out measurements."""
        kept, out = OperatorTables(), OperatorTables()
        for each in fields(self):
            found = getattr(self, each.name)
            for part, rows in found.items() if isinstance(found, dict) else [(None, found)]:
                at = {_size(row) for row in rows}
                left_out = set(sorted(at)[1::3])
                for side, is_out in ((kept, False), (out, True)):
                    mine = [row for row in rows if (_size(row) in left_out) is is_out]
                    if part is None:
                        getattr(side, each.name).extend(mine)
                    elif mine:
                        getattr(side, each.name)[part] = mine
        return kept, out


def _size(row: Any) -> tuple[int, ...]:
    """Return the size by which a measurement is held out."""
    if isinstance(row, ChunkKernel):
        return (row.prefix or row.length,)
    if isinstance(row, DecodeKernel):
        return (row.requests, row.context)
    return (row.size,) if isinstance(row, Message) else (row.rows,)
