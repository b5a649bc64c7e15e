"""Collectives through shared memory are those of gloo, the same to the bit on all ranks, and leave no file behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = r"""
import hashlib, sys
import torch
import torch.distributed as dist
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous

rank, folder, shared = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "shared"
torch.set_num_threads(1)
with Groups.start(Rendezvous(rank, 3, f"file://{folder}/ranks", "cpu"), Mesh(1, 3, rank), 30) as groups:
    assert (groups._shared is not None) == shared
    for seed, size in enumerate((1, 7, 65536, 65537, 200001, 3)):
        parts = [torch.randn(size, generator=torch.Generator().manual_seed(10 * seed + other)) for other in range(3)]
        found = groups.all_reduce(parts[rank].clone())
        torch.testing.assert_close(found, parts[0] + parts[1] + parts[2])
        digest = torch.frombuffer(bytearray(hashlib.md5(found.numpy().tobytes()).digest()), dtype=torch.uint8)
        seen = [torch.empty_like(digest) for _ in range(3)]
        dist.all_gather(seen, digest, group=groups.tp)
        assert all(torch.equal(each, digest) for each in seen)
    for seed, (R, V) in enumerate(((1, 5), (4, 40000), (3, 70001), (0, 9))):
        parts = [torch.randn(R, V, generator=torch.Generator().manual_seed(seed + other)) for other in range(3)]
        assert torch.equal(groups.all_gather(parts[rank]), torch.cat(parts, dim=-1))
    half = torch.full((4,), rank, dtype=torch.bfloat16)
    assert groups.all_reduce(half).tolist() == [3.0] * 4
    dist.barrier()
    if shared and rank < 2:
        groups._shared._timeout_s = 0.2
        try:
            groups.all_reduce(torch.ones(3))
        except RuntimeError as error:
            assert "timed out: a rank of this stage did not come within 0.2 s" in str(error)
        else:
            raise AssertionError("nobody waited for the third")
"""


@pytest.mark.parametrize("how", ["shared", "no compiler on one rank"])
def test_collectives_of_three_ranks(how: str, tmp_path: Path) -> None:
    files = set(Path("/dev/shm").glob("gapless-*"))
    one = {"CXX": "/nowhere/c++", "XDG_CACHE_HOME": str(tmp_path)} if how != "shared" else {}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path), how],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (one if rank == 1 else {}),
        )
        for rank in range(3)
    ]
    try:
        assert [rank.wait(timeout=90) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert set(Path("/dev/shm").glob("gapless-*")) <= files
