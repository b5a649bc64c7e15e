"""Models of experts give the tokens and logits of `transformers`, on one rank and on several, sliced and whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support.expert_models import FAMILIES
from tests.support.forked_ranks import run_ranks
from tests.support.stage_driver import run, run_all
from tests.support.token_reference import Folders, check, job

GRIDS = [
    (1, 2, {"chunks": [5, 3]}),
    (1, 2, {"chunks": [5, 3], "whole_experts": True, "plain": True}),
    pytest.param(2, 2, {"layers": [1, 2], "whole_experts": True}, marks=pytest.mark.slow),
    pytest.param(2, 1, {"layers": [2, 1]}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(FAMILIES, tmp_path_factory)


@pytest.mark.parametrize(("chunks", "scattered"), [([64], False), ([7], True), ([5, 3], True)])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_rank(name: str, chunks: list[int], scattered: bool, folders: Folders, tmp_path: Path) -> None:
    folder, tokens, logits = folders[name]
    each = job(tmp_path / "out.npz", weights=str(folder), chunks=chunks, scattered=scattered, plain=chunks == [7])
    torch.set_num_threads(1)
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        run(groups, each)
    check(tmp_path / "out.npz", tokens, logits)


@pytest.mark.parametrize(("pp", "tp", "over"), GRIDS)
def test_meshes(pp: int, tp: int, over: dict[str, Any], folders: Folders, tmp_path: Path) -> None:
    """Ranks have slices of the experts, or whole ones."""
    jobs = [job(tmp_path / f"{name}.npz", weights=str(folders[name][0]), **over) for name in FAMILIES]
    run_ranks(run_all, pp, tp, tmp_path, jobs)
    for name in FAMILIES:
        _, tokens, logits = folders[name]
        check(tmp_path / f"{name}.npz", tokens, logits)
