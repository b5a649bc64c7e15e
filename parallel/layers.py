"""Megatron's parallel layers, for inference: its sharding and its weights, without autograd on the way.

Megatron's own `forward` passes through autograd functions that only a backward pass needs; at the sizes that one CPU
core serves, they cost as much as the product itself. Shapes: T tokens, inputs and outputs 2-D.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .groups import Groups
from .megatron import ModelParallelConfig, tensor_parallel

_VOCAB_MULTIPLE = 8  # rows a rank: what tensor cores want


def padded_vocab(vocab_size: int, tp: int) -> int:
    """The vocabulary, padded so that each of `tp` ranks holds an equal, aligned share."""
    multiple = _VOCAB_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


def _config(groups: Groups, dtype: torch.dtype) -> ModelParallelConfig:
    return ModelParallelConfig(
        tensor_model_parallel_size=groups.mesh.tp,
        params_dtype=dtype,
        use_cpu_initialization=groups.device.type == "cpu",  # else Megatron allocates on the current CUDA device
        perform_initialization=False,
    )


def _no_init(weight: torch.Tensor) -> torch.Tensor:
    return weight


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the group, in place; `x` is contiguous."""
    if group.size() > 1:
        assert x.is_contiguous()
        dist.all_reduce(x, group=group)
    return x


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """[T, in] -> [T, out / tp]: each rank holds a share of the output's features."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype, groups: Groups) -> None:
        super().__init__(
            in_size, out_size, config=_config(groups, dtype), init_method=_no_init, bias=bias, tp_group=groups.tp
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """[T, in / tp] -> [T, out], summed over the ranks, each of which holds a share of the input's features."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype, groups: Groups) -> None:
        super().__init__(
            in_size, out_size, config=_config(groups, dtype), init_method=_no_init, bias=bias, input_is_parallel=True,
            skip_bias_add=False, tp_group=groups.tp,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp_group.size() == 1:
            return F.linear(x, self.weight, self.bias)
        out = all_reduce(F.linear(x, self.weight), self.tp_group)
        return out if self.bias is None else out.add_(self.bias)


class VocabParallelEmbedding(tensor_parallel.VocabParallelEmbedding):
    """[T] token ids -> [T, H]; each rank holds a share of the (padded) vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, groups: Groups) -> None:
        super().__init__(
            padded_vocab(vocab_size, groups.mesh.tp), hidden_size, init_method=_no_init,
            config=_config(groups, dtype), tp_group=groups.tp,
        )

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        if self.tp_group.size() == 1:
            return F.embedding(token_ids_T, self.weight)
        absent_T = (token_ids_T < self.vocab_start_index) | (token_ids_T >= self.vocab_end_index)
        rows_T = (token_ids_T - self.vocab_start_index).masked_fill_(absent_T, 0)
        return all_reduce(F.embedding(rows_T, self.weight).masked_fill_(absent_T[:, None], 0.0), self.tp_group)


class ReplicatedEmbedding(nn.Module):
    """[T] token ids -> [T, H]; each rank holds the whole vocabulary, and none waits for another."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, groups: Groups) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=groups.device))

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids_T, self.weight)


class LMHead(ColumnParallelLinear):
    """[R, H] -> [R, V] float32 on every rank: the vocabulary is gathered and its padding cut off."""

    def __init__(self, hidden_size: int, vocab_size: int, *, dtype: torch.dtype, groups: Groups) -> None:
        super().__init__(
            hidden_size, padded_vocab(vocab_size, groups.mesh.tp), bias=False, dtype=dtype, groups=groups
        )
        self.vocab_size = vocab_size

    def forward(self, x_RH: torch.Tensor) -> torch.Tensor:
        part = F.linear(x_RH, self.weight).float()
        tp = self.tp_group.size()
        if tp == 1 or not len(part):
            return part[:, : self.vocab_size] if tp == 1 else part.new_empty(0, self.vocab_size)
        parts = [torch.empty_like(part) for _ in range(tp)]
        dist.all_gather(parts, part, group=self.tp_group)
        return torch.cat(parts, dim=-1)[:, : self.vocab_size]
