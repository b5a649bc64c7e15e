"""Megatron's parallel layers for inference: they shard and store weights as Megatron does, but skip autograd.

Megatron's own `forward` calls autograd functions that only a backward pass needs. At the sizes that one CPU core
serves, they cost as much as the GEMM itself.

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

# (residual, hidden): the next norm adds the hidden state to the residual stream in place. None: it has been added.
Parts = tuple[Tensor, Tensor | None]

Format = WeightFormat | None  # of a layer's weight; None: unquantized, in the layer's dtype

_TENSOR_CORE_ALIGNMENT = 8  # a rank's vocabulary rows are a multiple of it


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Return the vocabulary size, padded so that each of `tp` ranks has an equal, aligned shard."""
    multiple = _TENSOR_CORE_ALIGNMENT * tp
    return -(-vocab_size // multiple) * multiple


def _config(groups: Groups, dtype: torch.dtype) -> ModelParallelConfig:
    return ModelParallelConfig(
        tensor_model_parallel_size=groups.mesh.tp,
        params_dtype=dtype,
        use_cpu_initialization=groups.device.type == "cpu",  # if False, Megatron allocates on the CUDA device
        perform_initialization=False,
    )


def _no_init(weight: Tensor) -> Tensor:
    return weight


def _forget_group(layer: Any) -> None:
    """Drop a built layer's reference to its group, which would keep the group alive (see `Groups`)."""
    layer.tp_group = None


class Packable:
    """A layer whose weight is packed for this device's GEMM kernels once it is loaded.

    With a quantized format, `quantized` is the weight, to be filled, until `pack` packs it, and `weight` is empty. With
    a 16-bit float format, `weight` has that type.
    """

    weight: nn.Parameter
    dtype: torch.dtype  # of activations
    quantized: QuantizedMatrix | None = None

    def pack(self) -> None:
        """Pack the weight for this device's GEMM kernels, if that is faster."""
        raise NotImplementedError

    def _hold(self, out_size: int, in_size: int, format: Format) -> None:
        """Allocate the weight in a format, if there is one, in place of the layer's dtype."""
        self.dtype = self.weight.dtype
        if format is not None and (short := short_type(format)) is not None:
            self.weight = nn.Parameter(self.weight.new_empty(out_size, in_size, dtype=short), requires_grad=False)
        elif format is not None:
            self.quantized = QuantizedMatrix.empty(out_size, in_size, format, self.weight.device)
            self._free()

    def _lay_out(self, *, is_table: bool = False) -> TableProduct | None:
        """Return the packed weight, and free the original; None: it stays, in the activation dtype."""
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
        """Return x @ weight.T + bias, using the packed weight if there is one."""
        return F.linear(x, self.weight, bias) if self.packed is None else self.packed.linear(x, bias)


class _Table(Packable):
    packed: TableProduct | None = None

    def pack(self) -> None:
        """Pack the rows if they are quantized."""
        if self.quantized is not None:
            self.packed, self.quantized = make_table(self.quantized, self.dtype), None

    def pack_for_head(self) -> None:
        """Pack the weight for the LM head's GEMM too, if that is faster."""
        self.pack()
        if self.packed is None:
            self.packed = self._lay_out(is_table=True)

    def _look_up(self, rows_T: Tensor) -> Tensor:
        return F.embedding(rows_T, self.weight).to(self.dtype) if self.packed is None else self.packed.rows(rows_T)


class ColumnParallelLinear(_Linear, tensor_parallel.ColumnParallelLinear):
    """Maps [T, in] to [T, out / tp]. Each rank has a shard of the output features."""

    def __init__(
        self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype, groups: Groups, format: Format = None
    ) -> None:
        super().__init__(
            in_size, out_size, config=_config(groups, dtype), init_method=_no_init, bias=bias, tp_group=groups.tp
        )
        _forget_group(self)
        self._hold(self.output_size_per_partition, in_size, format)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's shard of the output features, [T, out / tp], with bias."""
        return self._multiply(x, self.bias)

    def gated_silu(self, x: Tensor) -> Tensor | None:
        """Return silu(gate) * up of this rank's outputs [gate; up]; None if the kernel has no such fused epilogue."""
        packed = self.packed
        if not isinstance(packed, TiledWeight) or self.bias is not None or not packed.has_whole_halves:
            return None
        return packed.gated_silu(x)


class RowParallelLinear(_Linear, tensor_parallel.RowParallelLinear):
    """Maps [T, in / tp] to [T, out], to be added to a residual of that shape.

    Each rank has a shard of the input features; the results are all-reduced. Quantization groups of a `format` are
    within a rank's inputs; a single group for all inputs becomes one per rank.
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
        """Return residual + bias + all-reduced GEMM, [T, out]; the GEMM adds the residual itself if it can."""
        if self._groups.mesh.tp == 1 and self.packed is not None:
            return self.packed.linear(x, self.bias, residual), None
        return residual, self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """Return the all-reduced GEMM with bias, [T, out]."""
        part = self.partial(x)
        return self._groups.all_reduce(part) if self._groups.mesh.tp > 1 else part

    def partial(self, x: Tensor) -> Tensor:
        """Return this rank's partial sum, [T, out], before the all-reduce."""
        bias = self.bias if self._groups.mesh.tp_rank == 0 else None  # once in the sum, fused into the GEMM
        return self._multiply(x, bias)


class VocabParallelEmbedding(_Table, tensor_parallel.VocabParallelEmbedding):
    """Maps token ids [T] to [T, H]. Each rank has a shard of the padded vocabulary; the results are all-reduced."""

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
        """Return the embeddings [T, H], all-reduced: each rank contributes the rows of its own shard."""
        if self._groups.mesh.tp == 1:
            return self._look_up(token_ids_T)
        absent_T = (token_ids_T < self.vocab_start_index) | (token_ids_T >= self.vocab_end_index)
        rows_T = (token_ids_T - self.vocab_start_index).masked_fill_(absent_T, 0)
        return self._groups.all_reduce(self._look_up(rows_T).masked_fill_(absent_T[:, None], 0.0))


class ReplicatedEmbedding(_Table, nn.Module):
    """Maps token ids [T] to [T, H]. Each rank has the whole vocabulary, so that ranks need not communicate."""

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
    """Maps [T, in] to [T, out]. Each rank has the whole weight."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype, groups: Groups) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype, device=groups.device))
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype, device=groups.device)) if bias else None
        self._hold(out_size, in_size, None)

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [T, out]."""
        return self._multiply(x, self.bias)


class LMHead(ColumnParallelLinear):
    """Maps [R, H] to logits of the rows that this rank samples, over the whole vocabulary without padding."""

    def __init__(
        self, hidden_size: int, vocab_size: int, *, dtype: torch.dtype, groups: Groups, format: Format = None
    ) -> None:
        padded = padded_vocab(vocab_size, groups.mesh.tp)
        super().__init__(hidden_size, padded, bias=False, dtype=dtype, groups=groups, format=format)
        self.vocab_size = vocab_size
        self._groups = groups
        self._tied: list[VocabParallelEmbedding] = []

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Tie this head's weight to the embedding's, both before and after packing."""
        self.weight, self.quantized = embedding.weight, None
        self._tied = [embedding]  # in a list, so that it is not registered as a submodule

    def pack(self) -> None:
        """Pack the weight, jointly with a tied embedding; a tied weight may also be used as loaded."""
        if not self._tied:
            super().pack()
            return
        (embedding,) = self._tied
        embedding.pack_for_head()
        self.packed, self.weight = embedding.packed or take_rows(embedding.weight), embedding.weight

    def forward(self, x_RH: Tensor) -> Tensor:
        """Return the float32 logits of this rank's share of the rows (`Mesh.share_of`), [share, V].

        Our CPU kernels accumulate and write float32. Other GEMMs write and exchange the weights' dtype; in 16 bits the
        logits of likely tokens are often equal.
        """
        packed = self.packed
        logits = (
            packed.logits(x_RH) if isinstance(packed, CppProduct) and packed.takes_any_rows else super().forward(x_RH)
        )
        return self._groups.deal_rows(logits)[:, : self.vocab_size].float()
