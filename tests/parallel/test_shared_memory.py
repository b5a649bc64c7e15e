"""Collectives through shared memory are those of gloo, the same to the bit on all ranks, and leave no file behind."""

from __future__ import annotations

import hashlib
import time
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gapless.parallel import shared_memory
from gapless.parallel.frames import ConnectionLost
from gapless.parallel.groups import Groups
from tests.support.forked_ranks import run_ranks

FOLDER = Path("/dev/shm")


def check(groups: Groups, is_shared: bool) -> None:
    rank = groups.mesh.rank
    assert (groups._shared is not None) == is_shared
    for seed, (size, dtype) in enumerate(product((1, 7, 65536, 65537, 200001, 3), (torch.float32, torch.bfloat16))):
        parts = [torch.randn(size, generator=torch.Generator().manual_seed(10 * seed + other)) for other in range(3)]
        parts = [part.to(dtype) for part in parts]
        found = groups.all_reduce(parts[rank].clone())
        if is_shared or dtype == torch.float32:
            torch.testing.assert_close(found, parts[0] + parts[1] + parts[2])
        words = found.float().numpy().tobytes()
        digest = torch.frombuffer(bytearray(hashlib.md5(words).digest()), dtype=torch.uint8)
        seen = [torch.empty_like(digest) for _ in range(3)]
        dist.all_gather(seen, digest, group=groups.tp)
        assert all(torch.equal(each, digest) for each in seen)
    for seed, (R, V) in enumerate(((1, 5), (4, 40000), (3, 70001), (100, 999), (0, 9))):
        parts = [torch.randn(R, V, generator=torch.Generator().manual_seed(seed + other)) for other in range(3)]
        share = groups.mesh.share_of(R)
        own = slice(share.start, share.stop)
        assert torch.equal(groups.all_gather(parts[rank]), torch.cat(parts, dim=-1))
        assert torch.equal(groups.deal_rows(parts[rank]), torch.cat(parts, dim=-1)[own])
        halves = [part.bfloat16() for part in parts]  # of odd or even rows
        assert torch.equal(groups.all_gather(halves[rank]), torch.cat(halves, dim=-1))
        assert torch.equal(groups.deal_rows(halves[rank]), torch.cat(halves, dim=-1)[own])
    half = torch.full((4,), rank, dtype=torch.bfloat16)
    assert groups.all_reduce(half).tolist() == [3.0] * 4
    dist.barrier()
    if groups._shared is not None:
        check_who_is_late(groups, groups._shared)


def check_who_is_late(groups: Groups, shared: shared_memory.SharedMemory) -> None:
    """Check the errors of a rank that waits for one which does not come, and of one whose groups end."""
    if groups.mesh.rank == 2:
        return
    if groups.mesh.rank == 1:
        groups.end()
        with pytest.raises(ConnectionLost, match="the pipeline is being restarted"):
            groups.all_reduce(torch.ones(3))
        return
    shared._timeout_s = 0.2
    with pytest.raises(RuntimeError, match=r"timed out: a rank of this stage did not come within 0\.2 s"):
        groups.all_reduce(torch.ones(3))


def check_who_is_slow(groups: Groups) -> None:
    """Reduce many rounds, each rank late by turns: a fast one must not write where a slow one still reads."""
    rank, size = groups.mesh.rank, 1 << 16
    for turn in range(60):
        if turn % 3 == rank:
            time.sleep(0.002)
        found = groups.all_reduce(torch.full((size,), float(turn * 10 + rank)))
        assert found.min() == found.max() == 30 * turn + 3


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "no compiler on one rank"])
def test_collectives_of_three_ranks(is_shared: bool, tmp_path: Path) -> None:
    lacking = {} if is_shared else {1: {"CXX": "/nowhere/c++", "XDG_CACHE_HOME": str(tmp_path / "cache")}}
    files = set(FOLDER.glob("gapless-*"))
    run_ranks(check, 1, 3, tmp_path, is_shared, environment=lacking)
    assert set(FOLDER.glob("gapless-*")) <= files


def test_a_buffer_is_not_written_while_another_rank_reads_it(tmp_path: Path) -> None:
    run_ranks(check_who_is_slow, 1, 3, tmp_path)
