"""An embedding that is the LM head too, packed once for both."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.parallel.groups import Groups
from gapless.parallel.layers import LMHead, VocabParallelEmbedding
from gapless.parallel.mesh import Mesh
from gapless.parallel.packed import PackedWeight, can_pack, pack
from gapless.parallel.rendezvous import Rendezvous
from gapless.parallel.tiled import TiledWeight
from tests.support.tiers import examples

TYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(torch.empty(1, dtype=dtype))]


@given(
    blocks=st.integers(1, 5),
    size=st.integers(1, 40),
    ids=st.lists(st.integers(0, 63), max_size=9),
    dtype=st.sampled_from(TYPES),
)
@settings(max_examples=examples(60), deadline=None)
def test_rows_are_those_that_were_packed(blocks: int, size: int, ids: list[int], dtype: torch.dtype) -> None:
    weight = torch.randn(64 * blocks, 2 * size, generator=torch.Generator().manual_seed(size)).to(dtype)
    table = PackedWeight(weight)
    if table.can_be_read:  # oneDNN pads some sizes
        at = torch.tensor([n * blocks for n in ids], dtype=torch.int64)
        assert torch.equal(table.rows(at), weight[at])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [512, 100])
def test_a_tied_head_and_its_embedding_hold_one_weight(vocab: int, dtype: torch.dtype) -> None:
    """The smaller vocabulary is no multiple of 32: its weight stays as it was loaded, and one of float32."""
    is_packed = vocab == 512 and dtype == torch.bfloat16
    with Groups.start(Rendezvous(0, 1, device="cpu"), Mesh(1, 1), 60.0) as groups:
        embedding = VocabParallelEmbedding(vocab, 64, dtype=dtype, groups=groups)
        head = LMHead(64, vocab, dtype=dtype, groups=groups)
        weight = torch.randn(len(embedding.weight), 64).to(dtype)
        embedding.weight.data.copy_(weight)
        head.tie(embedding)
        for module in (embedding, head):
            module.pack()
        assert isinstance(head.packed, PackedWeight | TiledWeight) == is_packed
        assert len(head.weight) == len(embedding.weight) == (0 if is_packed else len(weight))
        ids = torch.tensor([3, 99, 0])
        assert torch.equal(embedding(ids), weight[ids])
        for rows in (1, 5, 130):
            x = torch.randn(rows, 64).to(dtype)
            expected = F.linear(x.float(), weight.float())[:, :vocab]
            tolerance = 1e-4 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(head(x), expected, rtol=tolerance, atol=8 * tolerance)


def test_other_types_stay() -> None:
    for dtype in (torch.float16, torch.float32):
        assert pack(torch.empty(64, 8, dtype=dtype), is_table=True) is None
