"""A stage that runs by works over fixed buffers computes what it computes at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch

from gapless.conf.architecture import Architecture
from gapless.models.attention import flash
from gapless.models.attention.backend import AttentionSizes
from gapless.models.attention.flash import FlashBackend
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.cuda_graphs import capture_graphs
from gapless.models.graphed_stage import BUCKETS, GraphedStage, bucket
from gapless.models.stage import Stage
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support.flash_operator import flash_on_cpu
from tests.support.lone_rank import ARCHITECTURES, BATCHES, lone_stage

CPU = torch.device("cpu")
BLOCKS = 9  # of four slots
LARGE = RaggedBatch.of([2] * 30, [Segment(0, 30, [3, 1, 0, 2, 5, 4, 6, 7])], [], [29])
BEYOND = RaggedBatch.of([2] * (BUCKETS[-1] + 1), [Segment(0, BUCKETS[-1] + 1, range(129))], [], [BUCKETS[-1]])


def twins(
    arch: Architecture, mesh: Mesh, device: torch.device, dtype: torch.dtype, num_blocks: int, block_size: int = 4
) -> list[Stage]:
    """Return two stages with the same weights, and with caches of which every slot was written."""
    stages = [lone_stage(arch, mesh, device, dtype, num_blocks, block_size=block_size) for _ in range(2)]
    for stage in stages:
        generator = torch.Generator(device).manual_seed(7)
        for parameter in stage.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
        for cache in (*stage.cache.keys, *stage.cache.values):
            cache.normal_(generator=generator)
    return stages


def compare(plain: Stage, other: Stage, pieces: GraphedStage, batch: RaggedBatch, tolerance: float) -> None:
    """Compute a micro-batch both ways, and compare outputs and caches."""
    arch, device = plain.arch, plain.device
    hidden = None
    if not plain.mesh.is_first:
        generator = torch.Generator(device).manual_seed(batch.num_tokens)
        hidden = torch.randn(batch.num_tokens, arch.hidden_size, dtype=plain.dtype, device=device, generator=generator)
    given = None if hidden is None else hidden.clone()
    expected = plain(plain.prepare(batch), hidden)  # which may write to it
    found = pieces.forward(other.prepare(batch), given)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    slots = slice(0, plain.cache.scratch_slot)
    for own, others in ((plain.cache.keys, other.cache.keys), (plain.cache.values, other.cache.values)):
        for a, b in zip(own, others, strict=True):
            torch.testing.assert_close(b[slots], a[slots], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pieces_compute_what_the_stage_computes(name: str, pp: int, tp: int) -> None:
    """Buffers hold what other micro-batches left, larger ones and smaller ones."""
    for rank in range(0, pp * tp, tp):
        with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60):
            plain, other = twins(ARCHITECTURES[name], Mesh(pp, tp, rank), CPU, torch.float32, BLOCKS)
        pieces = GraphedStage(other, list)
        for batch in (*BATCHES.values(), LARGE, *reversed(BATCHES.values())):
            compare(plain, other, pieces, batch, 1e-4)


def test_a_padding_row_may_hold_anything() -> None:
    """NaN in what earlier micro-batches left behind reaches no row that counts, nor the cache of a request."""
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60):
        plain, other = twins(ARCHITECTURES["llama"], Mesh(2, 1, 1), CPU, torch.float32, BLOCKS)
    pieces = GraphedStage(other, list)
    for buffer in (
        pieces._hidden,
        pieces._queries,
        pieces._attended,
        *(buffer for pair in pieces._ropes.values() for buffer in pair),
    ):
        buffer.fill_(float("nan"))
    assert bucket(BATCHES["mixed"].num_tokens) != BATCHES["mixed"].num_tokens
    compare(plain, other, pieces, BATCHES["mixed"], 1e-4)
    compare(plain, other, pieces, BATCHES["mixed"], 1e-4)


def test_what_is_sent_on_does_not_change_under_the_transport() -> None:
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60):
        _, stage = twins(ARCHITECTURES["llama"], Mesh(2, 1, 0), CPU, torch.float32, BLOCKS)
    pieces = GraphedStage(stage, list)
    sent = pieces.forward(stage.prepare(BATCHES["mixed"]))
    kept = sent.clone()
    pieces.forward(stage.prepare(LARGE))
    assert torch.equal(sent, kept)


PAGE = 256  # slots
PAGES = 12


class Pages:
    """Twins of a model that read keys by pages of 256 slots, and the places of the works that were run for one."""

    def __init__(self, arch: Architecture, mesh: Mesh) -> None:
        self.places: list[int | None] = []
        with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60):
            self.plain, self.other = twins(arch, mesh, CPU, torch.float32, PAGES, PAGE)
        for stage in (self.plain, self.other):
            window = arch.sliding_window
            stage.attentions[window] = FlashBackend(AttentionSizes(block_size=PAGE, window=window), paged=True)
            for layer in stage.decoder:
                layer.attention.backend = stage.attention  # type: ignore[union-attr, assignment]
        plans = self.other.attention.fixed_plans(1, arch.max_position, 0)
        assert plans is not None
        self.num_bounds = len(plans.bounds)
        self.graphed = GraphedStage(self.other, self.capture)

    def capture(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        places = [None] * self.num_bounds + [*range(len(self.other.decoder) + 1)]

        def counted(work: Callable[[], None], place: int | None) -> Callable[[], None]:
            return lambda: (self.places.append(place), work())[1]

        return [counted(work, places[i % len(places)]) for i, work in enumerate(works)]

    def run(self, batch: RaggedBatch) -> list[int | None]:
        """Compare a micro-batch, and return the places of the works that it took."""
        self.places.clear()
        compare(self.plain, self.other, self.graphed, batch, 1e-4)
        return self.places


def decodes(*starts: int) -> RaggedBatch:
    """Make decodes of requests with three blocks each, which lie out of order."""
    segments = [Segment(start, 1, [8 - i, i, 11 - i]) for i, start in enumerate(starts)]
    return RaggedBatch.of([2 + i for i in range(len(starts))], [], segments, list(range(len(starts))))


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decodes_alone_are_one_work_where_keys_are_read_by_pages(
    name: str, pp: int, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, cross pages and end; what padded rows held before is of other requests."""
    monkeypatch.setattr(flash, "_LEAST_BOUND", PAGE)
    arch = dataclasses.replace(ARCHITECTURES[name], max_position=3 * PAGE)
    if arch.sliding_window is not None:
        arch = dataclasses.replace(arch, sliding_window=400)
    for rank in range(0, pp * tp, tp):
        with flash_on_cpu():
            pages = Pages(arch, Mesh(pp, tp, rank))
            assert pages.num_bounds == 2
            pieces = list(range(len(pages.other.decoder) + 1))
            for starts in ([254, 3, 300], [255, 4], [256], [399, 0, 255, 7], [257, 398, 5]):
                assert pages.run(decodes(*starts)) == [None]
            beyond = pages.run(decodes(767, 400, 9))
            assert beyond == ([None] if arch.sliding_window is None else pieces), "the window hides keys"
            chunk = Segment(250, 9, [9, 10])
            assert pages.run(RaggedBatch.of([1] * 9, [chunk], [], [8])) == pieces
            mixed = RaggedBatch.of([1] * 10, [chunk], [Segment(300, 1, [0, 1])], [8, 9])
            assert pages.run(mixed) == pieces
            assert pages.run(decodes(8, 259)) == [None]


def test_a_padding_row_of_decodes_may_hold_anything() -> None:
    with flash_on_cpu():
        pages = Pages(dataclasses.replace(ARCHITECTURES["llama"], max_position=3 * PAGE), Mesh(3, 1, 1))
        graphed, cache = pages.graphed, pages.other.cache
        for tensor in (
            graphed._hidden,
            *(buffer for pair in graphed._ropes.values() for buffer in pair),
            *cache.keys,
            *cache.values,
        ):
            tensor[-PAGE:].fill_(float("nan"))
        graphed._hidden.fill_(float("nan"))
        assert pages.run(decodes(300, 2, 255)) == [None]
        assert pages.run(decodes(301, 3, 256, 600, 5)) == [None]
        assert pages.run(decodes(302)) == [None]


def test_more_rows_than_the_largest_bucket_run_without_pieces() -> None:
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60):
        plain, other = twins(ARCHITECTURES["llama"], Mesh(1, 1), CPU, torch.float32, 129)
    calls: list[int] = []
    pieces = GraphedStage(other, lambda works: [lambda: calls.append(1) for _ in works])
    compare(plain, other, pieces, BEYOND, 1e-4)
    assert not calls
    assert bucket(BUCKETS[-1] + 1) is None


def test_rows_are_padded_to_the_next_bucket() -> None:
    assert [bucket(n) for n in (1, 3, 100, 128, 129, 256, 257, 512)] == [1, 4, 128, 128, 256, 256, 384, 512]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_graphs_compute_what_the_stage_computes(name: str) -> None:
    device = torch.device("cuda", 0)
    with Groups.start(Rendezvous(0, 1, "", "cuda:0"), Mesh(1, 1), 60):
        plain, other = twins(ARCHITECTURES[name], Mesh(1, 1), device, torch.float32, BLOCKS)
        pieces = GraphedStage(other, capture_graphs)
        for batch in (LARGE, *BATCHES.values(), LARGE, *reversed(BATCHES.values())):
            compare(plain, other, pieces, batch, 1e-3)
