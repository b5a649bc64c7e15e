"""Activations over two stages of two ranks, each of which sends and receives its slice alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gapless.parallel.device_clock import DeviceClock
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.transport import Transport
from tests.support.forked_ranks import run_ranks

TOKENS, HIDDEN, DEPTH = (3, 1, 300, 2, 7), 6, 2


def activation(number: int) -> torch.Tensor:
    """[T, H], which lies in memory as [H, T] where the number is odd."""
    generator = torch.Generator().manual_seed(number)
    if number % 2:
        return torch.randn(HIDDEN, TOKENS[number], generator=generator).t()
    return torch.randn(TOKENS[number], HIDDEN, generator=generator)


def check(groups: Groups) -> None:
    mesh, clock = groups.mesh, DeviceClock()
    transport = Transport(groups, HIDDEN, torch.float32, DEPTH)
    if mesh.is_first:
        for number in range(len(TOKENS)):
            transport.send(activation(number))
            assert len(transport._sending) <= DEPTH, "what has left the pipeline is kept"
        transport.drain()
        assert not transport._sending
        return
    arrivals = [transport.post_receive(tokens) for tokens in TOKENS]
    for number, arrival in enumerate(arrivals):
        before = clock.mark()
        hidden, arrived = arrival.wait(clock)
        assert torch.equal(hidden, activation(number)), number
        assert before <= arrived <= clock.mark()


def test_a_whole_activation_comes_of_the_ranks_slices(tmp_path: Path) -> None:
    run_ranks(check, 2, 2, tmp_path)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (3, 1), (1, 4), (2, 2), (3, 4)])
def test_ranks_of_a_grid(pp: int, tp: int) -> None:
    ranks = [Mesh(pp, tp, rank) for rank in range(pp * tp)]
    assert [(mesh.stage, mesh.tp_rank) for mesh in ranks] == [(s, t) for s in range(pp) for t in range(tp)]
    for mesh in ranks:
        assert (mesh.is_first, mesh.is_last) == (mesh.stage == 0, mesh.stage == pp - 1)
        assert mesh.rank in mesh.tp_groups[mesh.stage]
        assert mesh.pp_groups[mesh.tp_rank][mesh.stage] == mesh.rank
        if not mesh.is_last:
            after = ranks[mesh.next]
            assert (after.stage, after.tp_rank, after.previous) == (mesh.stage + 1, mesh.tp_rank, mesh.rank)
    for groups in (ranks[0].tp_groups, ranks[0].pp_groups):
        assert sorted(rank for group in groups for rank in group) == list(range(pp * tp))
