"""Ranks over gloo that check something: forked, so that they start at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support.forked import Process
from tests.support.tiers import HANGS_S


def run_ranks(
    check: Callable[..., None],
    pp: int,
    tp: int,
    folder: Path,
    *arguments: Any,
    environment: Mapping[int, Mapping[str, str]] | None = None,
) -> None:
    """Run `check(groups, *arguments)` on each rank of a grid, and fail where one fails.

    Args:
        check: a function of a module, so that it can be pickled.
        pp: the stages of the grid.
        tp: the ranks of a stage.
        folder: an empty one, where the ranks find each other.
        *arguments: those of `check`, after the groups.
        environment: variables by rank, beside those of this process.
    """
    of_rank = [os.environ | (environment or {}).get(rank, {}) for rank in range(pp * tp)]
    ranks = [Process(_run, check, Mesh(pp, tp, n), folder, arguments, env=env) for n, env in enumerate(of_rank)]
    try:
        assert [rank.wait(HANGS_S) for rank in ranks] == [0] * len(ranks)
    finally:
        for rank in ranks:
            rank.kill()


def _run(check: Callable[..., None], mesh: Mesh, folder: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    rendezvous = Rendezvous(mesh.rank, mesh.world_size, f"file://{folder}/ranks", "cpu")
    with Groups.start(rendezvous, mesh, 30) as groups:
        check(groups, *arguments)
