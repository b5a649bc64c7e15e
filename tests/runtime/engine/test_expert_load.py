"""How uneven the routers of a run were: counted on each stage, written, read again, and named where a stage is slow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from gapless import LLM, SamplingParams
from gapless.conf.architecture import LayerKind
from gapless.conf.experts import ExpertsConfig
from gapless.models.experts.block import Experts
from gapless.models.experts.load import ExpertLoad
from gapless.parallel.mesh import Mesh
from gapless.runtime.analysis.run_folder.read import read_run_folder
from gapless.runtime.core.run_record import RunRecord
from tests.runtime.analysis.explain.test_replayed_causes import run_of
from tests.runtime.analysis.ledger.test_stragglers import record_of
from tests.support.lone_rank import LLAMA, LoneGroups
from tests.support.written_runs import analysed, write_run

ARCH = dataclasses.replace(
    LLAMA,
    experts=ExpertsConfig(num_experts=6, experts_per_token=2, ffn_size=16),
    layers=(LayerKind(experts=False), LayerKind(), LayerKind()),
)


class Picks(nn.Module):
    """A router that picks what it is told."""

    def __init__(self, picked_Tk: torch.Tensor) -> None:
        super().__init__()
        self.picked_Tk = picked_Tk

    def forward(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.picked_Tk[: len(x_TH)], torch.ones(len(x_TH), 2)


def test_the_load_is_that_of_the_busiest_experts() -> None:
    """Layers count by their tokens: the last one computes only those that sample."""
    picks = [[[0, 3], [1, 3], [2, 3], [4, 3]], [[5, 0], [1, 2], [3, 5], [4, 0]]]
    decoder: list[nn.Module] = [nn.Linear(1, 1)]
    for each in picks:
        block = Experts(ARCH, LoneGroups(Mesh(1, 1), torch.device("cpu")), None, whole=False, dtype=torch.float32)
        block.router = Picks(torch.tensor(each))
        decoder.append(nn.Sequential(block))
    load = ExpertLoad(range(4, 7), decoder)
    assert load.read() == ()
    for layer, rows in ((1, 4), (2, 1)):
        decoder[layer][0](torch.randn(rows, ARCH.hidden_size), torch.zeros(rows, ARCH.hidden_size))
    assert load.read() == (pytest.approx((4 + 1) / (8 / 6 + 2 / 6)), 5, 3)


@pytest.fixture(scope="module")
def record() -> Iterator[RunRecord]:
    experts = {"num_experts": 6, "experts_per_token": 2, "ffn_size": 16}
    keys = {"model.architecture.experts": experts, "parallel.threads": 1, "cache.num_blocks": 40}
    with LLM("tiny", **keys) as llm:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=5))
        yield llm.record


def test_spans_have_it_and_a_run_folder_keeps_it(record: RunRecord, tmp_path: Path) -> None:
    assert all(1 <= span.expert_load <= 6 for span in record.spans)
    assert {span.hot_layer for span in record.spans} <= set(range(4))
    write_run(tmp_path, record, {})
    again = read_run_folder(tmp_path).load().spans
    for field in ("expert_load", "hot_layer", "hot_expert"):
        kept, own = ([getattr(span, field) for span in spans] for spans in (again, record.spans))
        np.testing.assert_allclose(kept, own, atol=1e-8)


def test_models_without_experts_have_none() -> None:
    assert ExpertLoad(range(1), [nn.Linear(1, 1)]).read() == ()
    assert {span.expert_load for span in record_of(2, {}).spans} == {0.0}


@pytest.mark.parametrize("of_slow", [1.2, 3.0])
def test_a_slow_stage_is_explained_by_its_experts_where_their_load_differs(of_slow: float) -> None:
    made, _ = run_of("simulation.devices=[a100-80g,a6000]", "parallel.layers=[20,20]")
    record = dataclasses.replace(made)
    loads = (1.1, 0, 0), (of_slow, 7, 5)
    record.spans = [
        msgspec.structs.replace(
            span, **dict(zip(("expert_load", "hot_layer", "hot_expert"), loads[span.stage], strict=True))
        )
        for span in record.spans
    ]
    words = analysed(record, {}).words[0]
    assert words.startswith("A slow stage 1 (2.")
    named = ", its busiest experts get 3x the mean tokens, on other stages 1.1x, mostly expert 5 of"
    assert (f"{named} layer 7)" in words) == (of_slow == 3.0)
