"""Parallel layers over two gloo processes compute the same as whole layers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from gapless.parallel.layers import padded_vocab

RANK = """
import sys
import torch
import torch.nn.functional as F
from gapless.parallel.groups import Groups
from gapless.parallel.layers import ColumnParallelLinear, LMHead, RowParallelLinear, VocabParallelEmbedding
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous

rank, first, second = (int(word) for word in sys.argv[1:])
torch.set_num_threads(1)

with Groups.start(Rendezvous(rank, 2, f"tcp://127.0.0.1:{first}", "cpu"), Mesh(2, 1, rank), 30) as groups:
    assert (groups.pp.size(), groups.tp.size(), groups.pp.rank(), groups.tp.rank()) == (2, 1, rank, 0)

with Groups.start(Rendezvous(rank, 2, f"tcp://127.0.0.1:{second}", "cpu"), Mesh(1, 2, rank), 30) as groups:
    assert (groups.pp.size(), groups.tp.size(), groups.pp.rank(), groups.tp.rank()) == (1, 2, 0, rank)
    torch.manual_seed(0)
    half = {"dtype": torch.float32, "groups": groups}
    x, weight, bias = torch.randn(5, 12), torch.randn(8, 12), torch.randn(8)

    column = ColumnParallelLinear(12, 8, bias=True, **half)
    rows = slice(4 * rank, 4 * rank + 4)
    column.weight.data.copy_(weight[rows])
    column.bias.data.copy_(bias[rows])
    torch.testing.assert_close(column(x), F.linear(x, weight, bias)[:, rows])

    row = RowParallelLinear(12, 8, bias=True, **half)
    columns = slice(6 * rank, 6 * rank + 6)
    row.weight.data.copy_(weight[:, columns])
    row.bias.data.copy_(bias)
    residual = torch.randn(5, 8)
    expected = F.linear(x, weight, bias) + residual
    torch.testing.assert_close(row(x[:, columns], residual), expected)
    for linear in (column, row):
        linear.pack()
        assert not linear.weight.numel(), "no weight is held twice"
    torch.testing.assert_close(column(x), F.linear(x, weight, bias)[:, rows])
    torch.testing.assert_close(row(x[:, columns], residual), expected)
    torch.testing.assert_close(row(x[:0, columns], residual[:0]), expected[:0])

    table = torch.zeros(32, 12)
    table[:19] = torch.randn(19, 12)
    mine = table[16 * rank : 16 * rank + 16]
    embedding = VocabParallelEmbedding(19, 12, **half)
    embedding.weight.data.copy_(mine)
    ids = torch.tensor([0, 15, 16, 18])
    torch.testing.assert_close(embedding(ids), table[ids])
    assert ids.tolist() == [0, 15, 16, 18]

    head = LMHead(12, 19, **half)
    head.weight.data.copy_(mine)
    torch.testing.assert_close(head(x), F.linear(x, table[:19]))
    assert head(x[:0]).shape == (0, 19)
    assert head(x.clone()).dtype == torch.float32
"""


def test_layers_over_two_processes() -> None:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [str(server.getsockname()[1]) for server in servers]
    for server in servers:
        server.close()
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), *ports], env=os.environ | {"OMP_NUM_THREADS": "1"})
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=90) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(50257, 1, 50264), (50257, 8, 50304), (32000, 4, 32000)])
def test_vocabulary_is_padded_evenly(vocab: int, tp: int, padded: int) -> None:
    assert padded_vocab(vocab, tp) == padded
