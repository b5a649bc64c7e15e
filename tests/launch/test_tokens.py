"""Greedy outputs are token for token those of `transformers`, whatever the ranks, the policy and the cache."""

from __future__ import annotations

import random
from pathlib import Path

import hf_models
import pytest

from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    OrcaBestConfig,
    ParallelConfig,
    RequestLevelConfig,
    SarathiConfig,
    SchedulerConfig,
)
from gapless.launch.ray_launcher import RayLauncher
from gapless.runtime import LLM

OUTPUT = 20
LENGTHS = (37, 5, 64, 21, 50, 1)
PROMPTS = [[random.Random(n).randrange(hf_models.VOCAB) for _ in range(n)] for n in LENGTHS]
LAYOUTS = {"pp2-tp2": (2, 2), "tp2": (1, 2), "pp2": (2, 1), "local": (1, 1)}
POLICIES: list[SchedulerConfig] = [
    SarathiConfig(chunk=7, tile=1, batch=3),
    SarathiConfig(chunk=24, tile=8, batch=2),
    OrcaBestConfig(batch=3),
    RequestLevelConfig(batch=2),
]


@pytest.fixture(scope="session", params=list(hf_models.CONFIGS))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model folder and its greedy continuations of PROMPTS."""
    folder = tmp_path_factory.mktemp(request.param)
    model = hf_models.make_model(request.param, folder)
    return folder, [hf_models.greedy(model, prompt, OUTPUT) for prompt in PROMPTS]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_transformers(
    layout: str, reference: tuple[Path, list[list[int]]], ray_launcher: RayLauncher
) -> None:
    folder, expected = reference
    pp, tp = LAYOUTS[layout]
    config = EngineConfig(
        model=ModelConfig(weights=str(folder), tokenizer="none"),
        parallel=ParallelConfig(pp=pp, tp=tp, launcher="local" if pp * tp == 1 else "ray", threads=1),
        scheduler=POLICIES[0],
        cache=CacheConfig(block_size=4, num_blocks=30),  # the longest needs 21 of them: requests are preempted
    )
    preemptions = 0
    with LLM.from_config(config, launcher=ray_launcher if pp * tp > 1 else None) as llm:
        for policy in POLICIES:
            llm.reset(policy)
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=OUTPUT, ignore_eos=True))
            assert [o.outputs[0].token_ids for o in outputs] == expected, policy
            preemptions += sum(r.preemptions for r in llm.record.requests)
    assert preemptions > 0
