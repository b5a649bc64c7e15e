"""Megatron's parallel layers for inference: they shard and store weights as Megatron does, but skip autograd.

Megatron's own `forward` calls autograd functions that only a backward pass needs. At the sizes that one CPU core
serves, they cost as much as the matrix product itself.

Shapes: T tokens, H hidden size, R rows that need a token, V vocabulary. Inputs and outputs are 2-D.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.cpp_product import CppProduct
from ..kernels.packed import pack
from ..kernels.quantized import Product, TableProduct, make_product, make_table
from ..kernels.quantized_matrix import QuantizedMatrix
from ..kernels.row_weight import take_rows
from ..kernels.short_weight import keep_short, short_type
from ..kernels.tiled import TiledWeight
from ..kernels.weight_format import WeightFormat
from .groups import Groups
from .megatron import ModelParallelConfig, tensor_parallel

# A sum in two parts: the norm that follows adds the second to the first, in place. None: the first is all of it.
Parts = tuple[Tensor, Tensor | None]

Format = WeightFormat | None  # of a layer's weight; None: numbers of the layer's type

_TENSOR_CORE_ALIGNMENT = 8  # a rank's rows of the vocabulary are a multiple of it


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Return the vocabulary size, padded so that each of `tp` ranks holds an equal, aligned share."""
    multiple = _TENSOR_CORE_ALIGNMENT * tp
    return -(-vocab_size // multiple) * multiple


def _config(groups: Groups, dtype: torch.dtype) -> ModelParallelConfig:
    return ModelParallelConfig(
        tensor_model_parallel_size=groups.mesh.tp,
        params_dtype=dtype,
        use_cpu_initialization=groups.device.type == "cpu",  # where False, Megatron allocates on the CUDA device
        perform_initialization=False,
    )


def _no_init(weight: Tensor) -> Tensor:
    return weight


def _forget_group(layer: Any) -> None:
    """Have a built layer forget its group, which would live for as long as the layer does (see `Groups`)."""
    layer.tp_group = None


class Packable:
    """A layer whose weight is laid out for the products of this device once it is loaded.

    With a format, `quantized` is the weight, to be filled, until `pack` lays it out, and `weight` has no rows. Where
    the format is one of 16-bit floats, `weight` has that type.
    """

    weight: nn.Parameter
    dtype: torch.dtype  # of activations
    quantized: QuantizedMatrix | None = None

    def pack(self) -> None:
        """Lay the weight out for the products of this device, if there is something to gain."""
        raise NotImplementedError

    def _hold(self, out_size: int, in_size: int, format: Format) -> None:
        """Hold the weight in a format, if there is one, in place of numbers."""
        self.dtype = self.weight.dtype
        if format is not None and (short := short_type(format)) is not None:
            self.weight = nn.Parameter(self.weight.new_empty(out_size, in_size, dtype=short), requires_grad=False)
        elif format is not None:
            self.quantized = QuantizedMatrix.empty(out_size, in_size, format, self.weight.device)
            self._free()

    def _lay_out(self, *, is_table: bool = False) -> TableProduct | None:
        """Return the weight laid out, and free it; None: it stays, in the type of activations."""
        short = keep_short(self.weight, self.dtype)
        packed = short or pack(self.weight.to(self.dtype), is_table=is_table)
        if packed is not None:
            self._free()
        elif self.weight.dtype != self.dtype:
            self.weight = nn.Parameter(self.weight.to(self.dtype), requires_grad=False)
        return packed

    def _free(self) -> None:
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)


class _Linear(Packable):
    packed: Product | None = None

    def pack(self) -> None:
        """See `Packable.pack`."""
        if self.quantized is not None:
            self.packed, self.quantized = make_product(self.quantized, self.dtype), None
        else:
            self.packed = self._lay_out()

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ weight.T + bias by the packed weight, if there is one."""
        return F.linear(x, self.weight, bias) if self.packed is None else self.packed.linear(x, bias)


class _Table(Packable):
    packed: TableProduct | None = None

    def pack(self) -> None:
        """Lay quantized rows out; others stay as they are."""
        if self.quantized is not None:
            self.packed, self.quantized = make_table(self.quantized, self.dtype), None

    def pack_for_head(self) -> None:
        """Lay the weight out for the products of a head too, if there is something to gain."""
        self.pack()
        if self.packed is None:
            self.packed = self._lay_out(is_table=True)

    def _look_up(self, rows_T: Tensor) -> Tensor:
        return F.embedding(rows_T, self.weight).to(self.dtype) if self.packed is None else self.packed.rows(rows_T)


class ColumnParallelLinear(_Linear, tensor_parallel.ColumnParallelLinear):
    """Maps [T, in] to [T, out / tp]. Each rank holds a share of the output features."""

    def __init__(
        self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype, groups: Groups, format: Format = None
    ) -> None:
        super().__init__(
            in_size, out_size, config=_config(groups, dtype), init_method=_no_init, bias=bias, tp_group=groups.tp
        )
        _forget_group(self)
        self._hold(self.output_size_per_partition, in_size, format)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's share of the output features, [T, out / tp], with their bias."""
        return self._multiply(x, self.bias)

    def gated_silu(self, x: Tensor) -> Tensor | None:
        """Return silu(gate) * up of this rank's outputs [gate; up]; None where the weight's product has no such end."""
        packed = self.packed
        if not isinstance(packed, TiledWeight) or self.bias is not None or not packed.has_whole_halves:
            return None
        return packed.gated_silu(x)


class RowParallelLinear(_Linear, tensor_parallel.RowParallelLinear):
    """Maps [T, in / tp] to [T, out], which is to be added to a residual of that shape.

    Each rank holds a share of the input features; the results are summed. Groups of a `format` lie within a rank's
    inputs; one for all is one for each rank's.
    """

    def __init__(
        self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype, groups: Groups, format: Format = None
    ) -> None:
        super().__init__(
            in_size,
            out_size,
            config=_config(groups, dtype),
            init_method=_no_init,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=groups.tp,
        )
        _forget_group(self)
        self._groups = groups
        own_inputs = self.input_size_per_partition
        if format is not None and format.group == in_size:
            format = replace(format, group=own_inputs)
        self._hold(out_size, own_inputs, format)

    def forward(self, x: Tensor, residual: Tensor) -> Parts:
        """Return the sum of residual, bias and all ranks' products, [T, out]; the product adds the first if it can."""
        if self._groups.mesh.tp == 1 and self.packed is not None:
            return self.packed.linear(x, self.bias, residual), None
        return residual, self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """Return the sum of bias and all ranks' products, [T, out]."""
        part = self.partial(x)
        return self._groups.all_reduce(part) if self._groups.mesh.tp > 1 else part

    def partial(self, x: Tensor) -> Tensor:
        """Return this rank's part of that sum, [T, out]."""
        bias = self.bias if self._groups.mesh.tp_rank == 0 else None  # once in the sum, and within a product
        return self._multiply(x, bias)


class VocabParallelEmbedding(_Table, tensor_parallel.VocabParallelEmbedding):
    """Maps token ids [T] to [T, H]. Each rank holds a share of the padded vocabulary; the results are summed."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, groups: Groups, format: Format = None
    ) -> None:
        super().__init__(
            padded_vocab(vocab_size, groups.mesh.tp),
            hidden_size,
            init_method=_no_init,
            config=_config(groups, dtype),
            tp_group=groups.tp,
        )
        _forget_group(self)
        self._groups = groups
        self._hold(self.num_embeddings_per_partition, hidden_size, format)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """Return the embeddings [T, H], summed over the ranks: each adds those of its own share."""
        if self._groups.mesh.tp == 1:
            return self._look_up(token_ids_T)
        absent_T = (token_ids_T < self.vocab_start_index) | (token_ids_T >= self.vocab_end_index)
        rows_T = (token_ids_T - self.vocab_start_index).masked_fill_(absent_T, 0)
        return self._groups.all_reduce(self._look_up(rows_T).masked_fill_(absent_T[:, None], 0.0))


class ReplicatedEmbedding(_Table, nn.Module):
    """Maps token ids [T] to [T, H]. Each rank holds the whole vocabulary, so that ranks need not communicate."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, groups: Groups, format: Format = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=groups.device))
        self._hold(vocab_size, hidden_size, format)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """Return the embeddings [T, H]."""
        return self._look_up(token_ids_T)


class ReplicatedLinear(_Linear, nn.Module):
    """Maps [T, in] to [T, out]. Each rank holds the whole weight."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype, groups: Groups) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype, device=groups.device))
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype, device=groups.device)) if bias else None
        self._hold(out_size, in_size, None)

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [T, out]."""
        return self._multiply(x, self.bias)


class LMHead(ColumnParallelLinear):
    """Maps [R, H] to logits over the whole vocabulary, without its padding, of the rows that this rank samples."""

    def __init__(
        self, hidden_size: int, vocab_size: int, *, dtype: torch.dtype, groups: Groups, format: Format = None
    ) -> None:
        padded = padded_vocab(vocab_size, groups.mesh.tp)
        super().__init__(hidden_size, padded, bias=False, dtype=dtype, groups=groups, format=format)
        self.vocab_size = vocab_size
        self._groups = groups
        self._tied: list[VocabParallelEmbedding] = []

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Take the embedding's weight for this head's own, before and after both are packed."""
        self.weight, self.quantized = embedding.weight, None
        self._tied = [embedding]  # in a list, so that it is not one of this module's parts

    def pack(self) -> None:
        """Lay the weight out; a tied one for the embedding too, or else choose the product of one as it was loaded."""
        if not self._tied:
            super().pack()
            return
        (embedding,) = self._tied
        embedding.pack_for_head()
        self.packed, self.weight = embedding.packed or take_rows(embedding.weight), embedding.weight

    def forward(self, x_RH: Tensor) -> Tensor:
        """Return the logits, float32, of this rank's share of the rows (`Mesh.share_of`), [share, V].

        Products of a CPU's own sum and write them in float32. Others write the weights' type, in which likely tokens of
        16 bits are often equal, and which is exchanged.
        """
        packed = self.packed
        logits = (
            packed.logits(x_RH) if isinstance(packed, CppProduct) and packed.takes_any_rows else super().forward(x_RH)
        )
        return self._groups.deal_rows(logits)[:, : self.vocab_size].float()
