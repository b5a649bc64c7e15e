"""Parallel layers over two gloo processes compute the same as whole layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gapless.kernels.processor import multiplies_bfloat16
from gapless.kernels.quantized_matrix import QuantizedMatrix
from gapless.kernels.weight_format import WeightFormat
from gapless.parallel.groups import Groups
from gapless.parallel.layers import (
    ColumnParallelLinear,
    LMHead,
    ReplicatedEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    padded_vocab,
)
from tests.support.forked_ranks import run_ranks


def added(parts: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    return parts[0] if parts[1] is None else parts[0] + parts[1]


def check_stages(groups: Groups) -> None:
    rank = groups.mesh.rank
    assert (groups.pp.size(), groups.tp.size(), groups.pp.rank(), groups.tp.rank()) == (2, 1, rank, 0)


def check_layers(groups: Groups) -> None:
    rank = groups.mesh.rank
    assert (groups.pp.size(), groups.tp.size(), groups.pp.rank(), groups.tp.rank()) == (1, 2, 0, rank)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 12), torch.randn(8, 12), torch.randn(8)

    column = ColumnParallelLinear(12, 8, bias=True, dtype=torch.float32, groups=groups)
    rows = slice(4 * rank, 4 * rank + 4)
    column.weight.data.copy_(weight[rows])
    column.bias.data.copy_(bias[rows])
    torch.testing.assert_close(column(x), F.linear(x, weight, bias)[:, rows])

    row = RowParallelLinear(12, 8, bias=True, dtype=torch.float32, groups=groups)
    columns = slice(6 * rank, 6 * rank + 6)
    row.weight.data.copy_(weight[:, columns])
    row.bias.data.copy_(bias)
    residual = torch.randn(5, 8)
    expected = F.linear(x, weight, bias) + residual
    torch.testing.assert_close(added(row(x[:, columns], residual)), expected)
    for linear in (column, row):
        linear.pack()
        assert not linear.weight.numel(), "no weight is held twice"
    torch.testing.assert_close(column(x), F.linear(x, weight, bias)[:, rows])
    torch.testing.assert_close(added(row(x[:, columns], residual)), expected)
    torch.testing.assert_close(added(row(x[:0, columns], residual[:0])), expected[:0])

    table = torch.zeros(32, 12)
    table[:19] = torch.randn(19, 12)
    mine = table[16 * rank : 16 * rank + 16]
    embedding = VocabParallelEmbedding(19, 12, dtype=torch.float32, groups=groups)
    embedding.weight.data.copy_(mine)
    ids = torch.tensor([0, 15, 16, 18])
    torch.testing.assert_close(embedding(ids), table[ids])
    assert ids.tolist() == [0, 15, 16, 18]

    head = LMHead(12, 19, dtype=torch.float32, groups=groups)
    head.weight.data.copy_(mine)
    share = groups.mesh.share_of(len(x))
    own = slice(share.start, share.stop)
    torch.testing.assert_close(head(x), F.linear(x, table[:19])[own])
    assert head(x[:0]).shape == (0, 19)
    assert head(x[:1]).shape == (0 if rank else 1, 19), "the first rank has rows wherever there are some"
    half, halves = LMHead(12, 19, dtype=torch.bfloat16, groups=groups), (x.bfloat16(), table.bfloat16())
    half.weight.data.copy_(mine)
    logits = half(halves[0])
    whole = torch.cat([F.linear(halves[0], share) for share in halves[1].split(16)], dim=-1)[:, :19]
    assert logits.dtype == torch.float32
    assert torch.equal(logits, whole.float()[own]), "an exchange before the conversion changes no bit"


def random_matrix(outputs: int, inputs: int, format: WeightFormat) -> QuantizedMatrix:
    matrix = QuantizedMatrix.empty(outputs, inputs, format, "cpu")
    matrix.codes.random_(256)
    matrix.scales.uniform_(0.5, 1.0)
    if matrix.offsets is not None:
        matrix.offsets.uniform_(-8.0, 0.0)
    return matrix


def fill(into: QuantizedMatrix | None, whole: QuantizedMatrix, rows: slice, columns: slice = slice(None)) -> None:
    """Copy a part of a matrix whose groups are whole rows, or lie within the part."""
    assert into is not None
    codes = whole.unpacked()[rows, columns]
    into.codes.copy_(codes if into.format.bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4)
    share = slice(None)
    if columns != slice(None) and whole.format.group < whole.shape[1]:
        share = slice(columns.start // whole.format.group, columns.stop // whole.format.group)
    into.scales.copy_(whole.scales[rows, share])
    if into.offsets is not None and whole.offsets is not None:
        into.offsets.copy_(whole.offsets[rows, share])


def check_quantized(groups: Groups) -> None:
    rank = groups.mesh.rank
    torch.manual_seed(0)
    for format in (WeightFormat(4, 8), WeightFormat(8, 32), WeightFormat(4, 16, has_offsets=True)):
        x, bias, residual = torch.randn(5, 32), torch.randn(8), torch.randn(5, 8)
        whole = random_matrix(8, 32, format)
        expected = F.linear(x, whole.dequantized(), bias)
        # Without bfloat16, activations are rounded to 16 bits.
        error = 1e-4 if multiplies_bfloat16() else 2e-4 * float(whole.dequantized().norm(dim=1).max())
        rows, columns = slice(4 * rank, 4 * rank + 4), slice(16 * rank, 16 * rank + 16)
        column = ColumnParallelLinear(32, 8, bias=True, dtype=torch.float32, groups=groups, format=format)
        fill(column.quantized, whole, rows)
        column.bias.data.copy_(bias[rows])
        row = RowParallelLinear(32, 8, bias=True, dtype=torch.float32, groups=groups, format=format)
        fill(row.quantized, whole, slice(None), columns)
        row.bias.data.copy_(bias)
        for linear in (column, row):
            assert not linear.weight.numel(), "no plain weight is held"
            linear.pack()
            assert linear.quantized is None, "no weight is held twice"
        torch.testing.assert_close(column(x), expected[:, rows], rtol=1e-5, atol=error)
        torch.testing.assert_close(added(row(x[:, columns], residual)), expected + residual, rtol=1e-5, atol=error)

        whole = random_matrix(32, 32, format)
        embedding = VocabParallelEmbedding(27, 32, dtype=torch.float32, groups=groups, format=format)
        fill(embedding.quantized, whole, slice(16 * rank, 16 * rank + 16))
        head = LMHead(32, 27, dtype=torch.float32, groups=groups)
        head.tie(embedding)
        replicated = ReplicatedEmbedding(32, 32, dtype=torch.float32, groups=groups, format=format)
        fill(replicated.quantized, whole, slice(None))
        for layer in (embedding, replicated, head):
            layer.pack()
        assert head.packed is embedding.packed, "one copy in memory"
        ids = torch.tensor([26, 0, 15, 16])
        torch.testing.assert_close(embedding(ids), whole.dequantized()[ids])
        torch.testing.assert_close(replicated(ids), whole.dequantized()[ids])
        share = groups.mesh.share_of(len(x))
        logits = F.linear(x, whole.dequantized())[share.start : share.stop, :27]
        torch.testing.assert_close(head(x), logits, rtol=1e-5, atol=error)


def test_layers_over_two_processes(tmp_path: Path) -> None:
    cases = (("stages", check_stages, 2, 1), ("layers", check_layers, 1, 2), ("quantized", check_quantized, 1, 2))
    for name, check, pp, tp in cases:
        (tmp_path / name).mkdir()
        run_ranks(check, pp, tp, tmp_path / name)


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(50257, 1, 50264), (50257, 8, 50304), (32000, 4, 32000)])
def test_vocabulary_is_padded_evenly(vocab: int, tp: int, padded: int) -> None:
    assert padded_vocab(vocab, tp) == padded
