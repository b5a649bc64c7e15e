"""Memory in huge pages: tensors do not share any of it."""

from __future__ import annotations

import gc
import os

import torch

from gapless.kernels import huge_pages


def test_tensors_are_apart_aligned_and_outlive_each_other() -> None:
    shapes = [(3, 5), (), (0, 4), (7,), (1 << 20, 3), (9 << 20, 2)]
    found = [huge_pages.empty(*shape, dtype=torch.float32).fill_(i) for i, shape in enumerate(shapes)]
    assert [tuple(each.shape) for each in found] == shapes
    assert all(each.data_ptr() % 64 == 0 for each in found)
    del found[4]
    gc.collect()
    assert [int(each.unique()) for each in found if each.numel()] == [0, 1, 3, 5]


def test_a_copy_is_contiguous() -> None:
    rows = torch.randn(6, 4, dtype=torch.float64).bfloat16()
    found = huge_pages.copy(rows.T)
    assert found.is_contiguous()
    assert found.equal(rows.T)


def test_a_forked_process_has_memory_of_its_own() -> None:
    found = huge_pages.empty(8, dtype=torch.int32).fill_(1)
    child = os.fork()
    if not child:
        found.fill_(2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert found.eq(1).all()
