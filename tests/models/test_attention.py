"""The chunk mask of paper Figure 6 and both backends compute the same as plain attention over the whole text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gapless.conf.errors import ConfigError
from gapless.kernels.operators.base import TorchKernels
from gapless.models.attention import scores
from gapless.models.attention.backend import AttentionSizes
from gapless.models.attention.scores import ScoresBackend
from gapless.models.attention.sdpa import PaddedPlan, SdpaBackend, attend_decodes, chunk_mask
from gapless.models.attention.select import make_backend
from gapless.models.attention.xformers import XformersBackend
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.kv_cache import slot_mapping, slots_of

CPU = torch.device("cpu")
BLOCK = 4


def full_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention over one text in float64: [n, K, G, D] queries and [n, K, D] keys give [n, K * G * D]."""
    n, K, G, D = q.shape
    scores = torch.einsum("ikgd,jkd->kgij", q.double(), k.double()) / D**0.5
    i, j = torch.arange(n)[:, None], torch.arange(n)
    hidden = (j > i) if window is None else (j > i) | (j <= i - window)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(hidden, float("-inf")).exp()
    sunk = 0.0 if sinks is None else sinks.double().view(K, G, 1, 1).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + sunk)
    return torch.einsum("kgij,jkd->ikgd", weights, v.double()).reshape(n, K * G * D)


def compositions(n: int) -> list[list[int]]:
    """List every way to divide n tokens into consecutive chunks."""
    return [[]] if n == 0 else [[i, *rest] for i in range(1, n + 1) for rest in compositions(n - i)]


def test_figure_6_third_chunk() -> None:
    """In chunks of four, the third attends to the eight keys before it and to a triangle of its own."""
    seen = chunk_mask(8, 4, 0, AttentionSizes(block_size=BLOCK)) == 0
    assert seen.sum(-1).tolist() == [9, 10, 11, 12]
    assert all(row[: 9 + i].all() for i, row in enumerate(seen))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("blocks", [[1, 2], [2, 0]], ids=["in a row", "scattered"])
def test_every_split_of_a_prompt_is_the_full_prefill(window: int | None, blocks: list[int]) -> None:
    n, K, G, D = 7, 2, 3, 8
    q, k, v = torch.randn(n, K, G, D), torch.randn(n, K, D), torch.randn(n, K, D)
    expected = full_attention(q, k, v, window)
    backend = SdpaBackend(AttentionSizes(block_size=BLOCK, window=window))
    for sizes in compositions(n):
        keys, values = torch.full((12, K, D), float("nan")), torch.full((12, K, D), float("nan"))
        start = 0
        for size in sizes:
            batch = RaggedBatch.of([0] * size, [Segment(start, size, blocks)], [], [])
            rows = slice(start, start + size)
            slots = torch.from_numpy(slot_mapping(batch, BLOCK))
            keys[slots], values[slots] = k[rows], v[rows]
            out = backend.attend(q[rows], keys, values, backend.plan(batch))
            torch.testing.assert_close(out.double(), expected[rows], atol=1e-5, rtol=1e-5)
            start += size


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.7, False), (None, True), (0.7, True)])
def test_capped_scores_and_sinks_are_those_of_the_full_prefill(
    window: int | None, softcap: float | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, K, G, D = 7, 2, 3, 8
    q, k, v = torch.randn(n, K, G, D), torch.randn(n, K, D), torch.randn(n, K, D)
    own = torch.randn(K * G) if has_sinks else None
    expected = full_attention(q, k, v, window, softcap, own)
    backend = make_backend(
        "auto",
        TorchKernels(),
        AttentionSizes(block_size=BLOCK, num_blocks=3, window=window, head_dim=D),
        softcap=softcap,
        has_sinks=has_sinks,
    )
    assert isinstance(backend, ScoresBackend)
    for most, sizes in ((1 << 20, [7]), (40, [7]), (1 << 20, [3, 4]), (40, [2, 4, 1]), (1, [5, 1, 1])):
        monkeypatch.setattr(scores, "_MOST_SCORES", most)
        keys, values = torch.full((12, K, D), float("nan")), torch.full((12, K, D), float("nan"))
        start = 0
        for size in sizes:
            segment, rows = Segment(start, size, [2, 0]), slice(start, start + size)
            batch = RaggedBatch.of([0] * size, [segment] if size > 1 else [], [] if size > 1 else [segment], [])
            slots = torch.from_numpy(slot_mapping(batch, BLOCK))
            keys[slots], values[slots] = k[rows], v[rows]
            plan = backend.plan(batch)
            out = backend.attend(q[rows], keys, values, plan, own)
            torch.testing.assert_close(out.double(), expected[rows], atol=1e-5, rtol=1e-5)
            if size == 1:  # as a GPU computes several
                padded = replace(plan, decodes=backend.plan_padded(batch))
                torch.testing.assert_close(backend.attend(q[rows], keys, values, padded, own), out)
            start += size


MIXED = [
    RaggedBatch.of(
        [0] * 9, [Segment(3, 5, [4, 5]), Segment(0, 2, [9])], [Segment(6, 1, [0, 1]), Segment(0, 1, [7])], []
    ),
    RaggedBatch.of(
        [0] * 9, [Segment(3, 5, [5, 2]), Segment(0, 2, [9])], [Segment(6, 1, [8, 1]), Segment(11, 1, [7, 3, 0])], []
    ),
    RaggedBatch.of([0] * 2, [], [Segment(9, 1, [1, 2, 3]), Segment(4, 1, [8, 6])], []),
    RaggedBatch.of([0] * 6, [Segment(2, 6, [3, 4])], [], []),
]  # fmt: skip


@pytest.mark.parametrize("window", [None, 4, 8])
@pytest.mark.parametrize("batch", MIXED)
def test_xformers_plan_sees_what_sdpa_sees(batch: RaggedBatch, window: int | None) -> None:
    """The bias class of xformers, materialized over the keys that its operator would get, gives SDPA's result."""
    K, G, D, T = 2, 2, 8, batch.num_tokens
    q, keys, values = torch.randn(T, K, G, D), torch.randn(40, K, D), torch.randn(40, K, D)
    sdpa = SdpaBackend(AttentionSizes(block_size=BLOCK, window=window))
    expected = sdpa.attend(q, keys, values, sdpa.plan(batch))
    tested = XformersBackend(AttentionSizes(block_size=BLOCK, num_blocks=10, window=window))
    plan = tested.plan(batch)
    covered = torch.zeros(T, dtype=torch.int64)
    for windowed in plan.windowed:
        covered[windowed.rows] += 1
    for part in plan.parts:
        covered[part.rows] += 1
        k, v = (x if part.gather is None else x[part.gather] for x in (keys, values))
        mask = part.bias.materialize((part.rows.stop - part.rows.start, len(k)))
        out = F.scaled_dot_product_attention(
            q[part.rows].flatten(1, 2).transpose(0, 1),
            k.transpose(0, 1),
            v.transpose(0, 1),
            attn_mask=mask,
            enable_gqa=True,
        )
        torch.testing.assert_close(out.transpose(0, 1).reshape(-1, K * G * D), expected[part.rows])
    assert covered.tolist() == [1] * T


def test_padded_decodes_are_the_single_ones() -> None:
    """A GPU computes all decodes in one padded call. NaN in unwritten slots does not reach the result."""
    batch, K, G, D = MIXED[1], 2, 2, 8
    backend = SdpaBackend(AttentionSizes(block_size=BLOCK))
    q = torch.randn(9, K, G, D)
    keys, values = (torch.full((40, K, D), float("nan")) for _ in range(2))
    for decode in batch.decodes:
        slots = torch.as_tensor(slots_of(decode.blocks, 0, decode.context, BLOCK))
        keys[slots], values[slots] = torch.randn(len(slots), K, D), torch.randn(len(slots), K, D)
    single, padded = torch.zeros(9, K * G * D), torch.zeros(9, K * G * D)
    attend_decodes(q, keys, values, backend.plan_decodes(batch), single)
    plan = backend.plan_padded(batch)
    assert isinstance(plan, PaddedPlan)
    attend_decodes(q, keys, values, plan, padded)
    torch.testing.assert_close(padded, single)
    assert padded[7:].isfinite().all()
    assert padded[7:].abs().min() > 0


def test_slots_in_a_row_are_a_range() -> None:
    assert slots_of([5, 6, 7], 3, 10, 4) == range(23, 30)
    assert slots_of([5, 9, 6], 3, 10, 4).tolist() == [23, 36, 37, 38, 39, 24, 25]  # type: ignore[union-attr]
    assert slots_of([9, 5, 6], 5, 9, 4) == range(21, 25)


def test_xformers_on_a_cpu_is_refused_in_one_line() -> None:
    arguments = {"block_size": 4, "num_blocks": 4, "window": None, "dtype": torch.float32, "device": CPU, "head_dim": 8}
    with pytest.raises(ConfigError, match=r"model\.attention=xformers: needs CUDA") as caught:
        make_backend("xformers", TorchKernels(), AttentionSizes(**arguments))
    assert "\n" not in str(caught.value)
    assert isinstance(make_backend("auto", TorchKernels(), AttentionSizes(**arguments)), SdpaBackend)
    with pytest.raises(ConfigError, match=r"model\.attention=flash: supports no soft caps"):
        make_backend("flash", TorchKernels(), AttentionSizes(**arguments), softcap=50.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("batch", MIXED)
@pytest.mark.parametrize("name", ["sdpa", "xformers", "flash"])
def test_cuda_gives_what_the_cpu_gives(batch: RaggedBatch, name: str) -> None:
    K, G, D = 2, 2, 64
    q, keys, values = torch.randn(9, K, G, D)[: batch.num_tokens], torch.randn(40, K, D), torch.randn(40, K, D)
    cpu = SdpaBackend(AttentionSizes(block_size=BLOCK))
    expected = cpu.attend(q, keys, values, cpu.plan(batch))
    device = torch.device("cuda")
    backend = make_backend(
        name,
        TorchKernels(),
        AttentionSizes(block_size=BLOCK, num_blocks=10, dtype=torch.bfloat16, device=device, head_dim=D),
    )
    q, keys, values = (x.to(device, torch.bfloat16) for x in (q, keys, values))
    found = backend.attend(q, keys, values, backend.plan(batch))
    torch.testing.assert_close(found.float().cpu(), expected, atol=0.03, rtol=0.03)


def test_the_sampled_rows_of_a_batch_are_a_batch() -> None:
    """Of the chunks, the first samples none, the second its last, the third (a draft to verify) all of its rows."""
    chunks = [Segment(3, 5, [4, 5]), Segment(0, 2, [9]), Segment(7, 3, [1, 2, 3])]
    batch = RaggedBatch.of(list(range(12)), chunks, [Segment(6, 1, [0, 1]), Segment(0, 1, [7])], [6, 7, 8, 9, 10, 11])
    found = batch.sampled()
    assert list(found.token_ids) == [6, 7, 8, 9, 10, 11]
    assert found.chunks == [Segment(1, 1, [9]), Segment(7, 3, [1, 2, 3])]
    assert found.decodes == batch.decodes
    assert list(found.sample_rows) == list(range(6))
