"""Layers are grouped so that blocks behind windows are freed, and never for more memory than one table takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.architecture import Architecture, LayerKind
from gapless.conf.schema import HardwareConfig, ModelConfig, ParallelConfig
from gapless.models.batch import Decodes, RaggedBatch, Segment, tables_of
from gapless.models.block_groups import ONE_TABLE, Windows, blocks_held, group_windows, layers_of_a_block, places
from gapless.models.graphed_stage import GraphedStage
from gapless.models.memory import MemoryModel
from gapless.models.stage import Stage
from gapless.models.stage_spec import StageSpec
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from gapless.parallel.split import split_layers
from tests.support.lone_rank import BATCHES, LLAMA, MIXED, LoneGroups
from tests.support.tiers import examples

CPU = torch.device("cpu")


def mixed(windows: Sequence[int | None], max_position: int) -> Architecture:
    kinds = tuple(LayerKind(window=window) for window in windows)
    return dataclasses.replace(LLAMA, num_layers=len(kinds), layers=kinds, max_position=max_position)


GEMMA3_27B = mixed([None if i % 6 == 5 else 1024 for i in range(62)], 32_768)
GPT_OSS = mixed([128, None] * 18, 131_072)
MISTRAL = dataclasses.replace(LLAMA, sliding_window=4096, max_position=32_768)


@pytest.mark.parametrize(
    ("arch", "pp", "windows"),
    [
        pytest.param(GEMMA3_27B, 1, (None, *[1024] * 5), id="gemma3"),
        pytest.param(GEMMA3_27B, 4, (None, *[1024] * 5), id="gemma3-pp4"),
        pytest.param(GPT_OSS, 1, (None, 128), id="gpt-oss"),
        pytest.param(GPT_OSS, 3, (None, 128), id="gpt-oss-pp3"),
        pytest.param(MISTRAL, 1, (4096,), id="mistral"),
        pytest.param(dataclasses.replace(MISTRAL, max_position=4096), 1, ONE_TABLE, id="mistral-within-its-window"),
        pytest.param(LLAMA, 2, ONE_TABLE, id="llama"),
        pytest.param(mixed([8, 16, 16], 64), 1, (8, 16, 16), id="two-windows"),
        pytest.param(mixed([None, *[900] * 3], 1000), 1, ONE_TABLE, id="a-window-that-saves-little"),
    ],
)
def test_the_groups_of_known_models(arch: Architecture, pp: int, windows: Windows) -> None:
    assert group_windows(arch, split_layers(arch, pp, None)) == windows


@pytest.mark.parametrize(("arch", "times"), [(GEMMA3_27B, 3.0), (GPT_OSS, 1.9), (MISTRAL, 3.9)], ids=str)
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_more_sequences_of_the_whole_context_fit(arch: Architecture, times: float, pp: int) -> None:
    if pp > arch.num_layers:
        pytest.skip("one layer a stage at least")
    parallel = ParallelConfig(pp=pp, launcher="ray")
    one = MemoryModel(arch, parallel, [HardwareConfig(memory_gib=16)] * pp, 2)
    grouped = dataclasses.replace(one, windows=group_windows(arch, split_layers(arch, pp, None)))
    assert grouped.slots() >= times * one.slots() - 1
    needed = blocks_held(arch.max_position, grouped.windows, 16)
    assert grouped.blocks(16) // needed == pytest.approx(grouped.slots(), rel=0.02, abs=1)


@settings(max_examples=examples(200))
@given(
    windows=st.lists(st.sampled_from([None, 7, 40, 300]), min_size=1, max_size=30),
    longest=st.integers(4, 1000),
    pp=st.integers(1, 4),
)
def test_groups_take_no_more_memory_than_one_table(windows: list[int | None], longest: int, pp: int) -> None:
    arch = mixed(windows, longest)
    split = split_layers(arch, min(pp, len(windows)), None)
    groups = group_windows(arch, split)
    assert sorted(groups, key=lambda window: (window is not None, window)) == list(groups)

    def tokens(windows: Windows) -> int:
        return max(layers_of_a_block(arch, layers, windows) for layers in split) * blocks_held(longest, windows, 1)

    assert tokens(groups) <= 1.05 * tokens(ONE_TABLE)
    for layers in split:
        own = [windows[i] for i in layers]
        found = places(own, groups)
        assert len(set(found)) == len(found), "two layers in one place"
        for window, (group, place) in zip(own, found, strict=True):
            assert place < layers_of_a_block(arch, layers, groups)
            freed = groups[group]
            assert freed is None or (window is not None and window <= freed), "a block would be freed too early"


def stage_of(arch: Architecture, windows: Windows, mesh: Mesh) -> Stage:
    layers = split_layers(arch, mesh.pp, None)[mesh.stage]
    model, span = ModelConfig(architecture=arch, dtype="float32", attention="sdpa"), (layers.start, layers.stop)
    spec = StageSpec(model=model, arch=arch, layers=span, num_blocks=40, block_size=4, windows=windows)
    made = Stage(spec, LoneGroups(mesh, CPU))
    generator = torch.Generator().manual_seed(7)
    for parameter in made.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
    return made


def elsewhere(batch: RaggedBatch, shift: int) -> RaggedBatch:
    """Return the batch in other blocks."""
    chunks = [Segment(c.start, c.length, [block + shift for block in c.blocks]) for c in batch.chunks]
    decodes = Decodes(
        batch.decodes.starts, tables_of(list(batch.decodes)) + shift if len(batch.decodes) else batch.decodes.tables
    )
    return dataclasses.replace(batch, chunks=chunks, decodes=decodes)


@pytest.mark.parametrize("pieces", [False, True], ids=["at-once", "pieces"])
@pytest.mark.parametrize(("windows", "pp"), [((None, 6), 1), ((None, 6, 6), 1), ((None, 6, 6), 2)], ids=str)
def test_a_stage_with_a_table_a_group_computes_what_one_with_one_table_computes(
    windows: Windows, pp: int, pieces: bool
) -> None:
    arch = MIXED["windows"]
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60):
        for rank in range(pp):
            one, grouped = stage_of(arch, ONE_TABLE, Mesh(pp, 1, rank)), stage_of(arch, windows, Mesh(pp, 1, rank))
            assert len({keys.data_ptr() for keys in grouped.cache.keys}) == layers_of_a_block(arch, one.layers, windows)
            forward = GraphedStage(grouped, list).forward if pieces else grouped
            past = [Segment(0, 9, [0, 2, 5]), Segment(0, 9, [4, 6, 7]), Segment(0, 3, [8])]
            history = RaggedBatch.of([1] * 21, past, [], [20])
            for batch in (history, BATCHES["first chunk"], *BATCHES.values()):
                hidden = None
                if rank:
                    hidden = torch.randn(batch.num_tokens, arch.hidden_size, generator=torch.Generator().manual_seed(1))
                expected = one(one.prepare(batch), None if hidden is None else hidden.clone())
                others = [elsewhere(batch, 10 * group) for group in range(1, len(windows))]
                found = forward(grouped.prepare(dataclasses.replace(batch, others=others)), hidden)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
