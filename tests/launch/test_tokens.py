"""Greedy outputs are token for token those of `transformers`, whatever the ranks, the policy and the cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from gapless import LLM
from gapless.conf.policies import (
    EqualTimeConfig,
    OrcaBestConfig,
    OrcaWorstConfig,
    PrefillFirstConfig,
    RequestLevelConfig,
    SarathiConfig,
    SchedulerConfig,
    TokenBudgetConfig,
    TokenThrottleConfig,
)
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from gapless.launch.ray_launcher import RayLauncher
from gapless.models.block_groups import ONE_TABLE, Windows, blocks_held, group_windows
from gapless.models.checkpoint import Checkpoint
from gapless.parallel.split import split_layers
from gapless.runtime.scheduler.policies import find_policy
from tests.support import hf_models

OUTPUT = 14
LENGTHS = (37, 5, 64, 21, 50, 1)
REPEATED = [[random.Random(n).randrange(hf_models.VOCAB)] * n for n in LENGTHS]  # drafts are made of them
ALIKE = {64: [*REPEATED[2][:43], 7, 3, 9], 37: [*REPEATED[0][:30], *range(20)]}  # by the prompt that they begin like
PROMPTS = [each for prompt in REPEATED for each in (prompt, ALIKE.get(len(prompt))) if each]
LAYOUTS = {"pp2-tp2": (2, 2), "tp2": (1, 2), "pp2": (2, 1), "local": (1, 1)}
POLICIES: list[SchedulerConfig] = [
    SarathiConfig(chunk=7, tile=1, batch=3),
    SarathiConfig(chunk=24, tile=8, batch=2, drafts=5),
    OrcaBestConfig(batch=3, drafts=2),
    RequestLevelConfig(batch=2, drafts=8),
    OrcaWorstConfig(batch=2, drafts=3),
    PrefillFirstConfig(batch=3, max_prefill_tokens=70, drafts=4),
    TokenBudgetConfig(batch=3, max_batched_tokens=20, order="shortest_prompt"),
    TokenThrottleConfig(batch=3, min_prefill_tokens=5, order="fair_share"),
    EqualTimeConfig(batch=3, chunk=16, tile=4, drafts=6),
    TokenBudgetConfig(batch=3, max_batched_tokens=20, drafts=4),
    TokenThrottleConfig(batch=3, min_prefill_tokens=5, drafts=4),
]
PART = 3  # of the policies that a model runs under in a layout: all of them over the layouts, and over the models


BAD = tuple((n, m) for n in range(0, 90, 3) for m in range(0, 90, 2))
GREEDY = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
SAMPLED_WAYS = [
    SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=1, temperature=0.7, top_p=0.9),
    SamplingParams(
        max_tokens=OUTPUT, ignore_eos=True, seed=2, temperature=3.0, top_k=40, presence_penalty=1.0, bad_words_ids=BAD
    ),
    SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=3, temperature=5.0, min_p=0.01, repetition_penalty=1.5),
]
SAMPLED = [SAMPLED_WAYS[(number + 1) % 3] for number in range(len(PROMPTS))]


@dataclass
class Reference:
    """A model folder, its greedy continuations of PROMPTS, and one rank's sampled ones without memory pressure."""

    name: str
    folder: Path
    greedy: list[list[int]]
    sampled: list[list[int]]


def start(
    folder: Path,
    layout: str,
    num_blocks: int,
    launcher: RayLauncher | None,
    prefix_caching: bool = True,
    cache_dtype: Literal["auto", "int8", "fp8"] = "auto",
    kernels: Literal["auto", "torch"] = "auto",
) -> LLM:
    pp, tp = LAYOUTS[layout]
    whole = layout == "tp2" and "num_experts_per_tok" in (folder / "config.json").read_text()  # else slices of experts
    config = EngineConfig(
        model=ModelConfig(weights=str(folder), tokenizer="none", kernels=kernels),
        parallel=ParallelConfig(
            pp=pp, tp=tp, expert_parallel=whole, launcher="local" if pp * tp == 1 else "ray", threads=1
        ),
        scheduler=POLICIES[0],
        cache=CacheConfig(block_size=4, num_blocks=num_blocks, prefix_caching=prefix_caching, dtype=cache_dtype),
    )
    return LLM.from_config(config, launcher=launcher if pp * tp > 1 else None)


def run(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]


def windows_of(folder: Path, layout: str) -> Windows:
    arch = Checkpoint.open(ModelConfig(weights=str(folder), tokenizer="none")).arch
    return group_windows(arch, split_layers(arch, LAYOUTS[layout][0], None))


@pytest.fixture(scope="session")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    model = hf_models.make_model(request.param, folder)
    with start(folder, "local", 500, None, prefix_caching=False) as llm:
        sampled = run(llm, SAMPLED)
    return Reference(request.param, folder, [hf_models.greedy(model, prompt, OUTPUT) for prompt in PROMPTS], sampled)


def cases() -> Iterator[Any]:
    """Yield every layout for a model with windows of its own or no trait, and one, by turns, for each other model.

    The first tier has one rank of the former, of latent attention, and of norms over all heads.
    """
    for number, name in enumerate(hf_models.CONFIGS):
        for place, layout in enumerate(LAYOUTS):
            if name in (*hf_models.PLAIN, "gemma3") or number % len(LAYOUTS) == place:
                is_first = layout == "local" and name in (*hf_models.PLAIN, "gemma3", "deepseek-v3", "olmo2")
                marks = () if is_first else pytest.mark.slow
                yield pytest.param(layout, name, id=f"{name}-{layout}", marks=marks)


@pytest.mark.parametrize(("layout", "reference"), cases(), indirect=["reference"])
def test_tokens_are_those_of_transformers(layout: str, reference: Reference, ray_launcher: RayLauncher) -> None:
    preemptions = drafts = cached = 0
    turn = list(LAYOUTS).index(layout) + list(hf_models.CONFIGS).index(reference.name)
    windows = windows_of(reference.folder, layout)
    num_blocks = blocks_held(64 + OUTPUT, windows, 4) + 4  # the longest request and a little more: 24 without windows
    with start(reference.folder, layout, num_blocks, ray_launcher) as llm:
        for policy in [POLICIES[0], *(p for i, p in enumerate(POLICIES[1:]) if i % PART == turn % PART)]:
            if windows != ONE_TABLE and not find_policy(policy).cuts_prompts:
                continue
            llm.reset(policy)
            assert run(llm, GREEDY) == reference.greedy, policy
            preemptions += sum(r.preemptions for r in llm.record.requests)
            drafts += sum(m.drafts for m in llm.record.micro_batches)
            cached += sum(r.cached_tokens for r in llm.record.requests)
        for policy in (POLICIES[0], replace(POLICIES[0], drafts=5, tile=8)):
            llm.reset(policy)
            assert run(llm, SAMPLED) == reference.sampled
            cached += sum(r.cached_tokens for r in llm.record.requests)
    assert preemptions > 0 or None not in windows  # a request that only has windows hardly grows
    assert drafts > 0
    assert cached > 0
    assert reference.sampled != reference.greedy


@pytest.mark.parametrize("reference", ["mistral", "gemma3"], indirect=True)
def test_policies_that_take_whole_prompts_free_what_is_behind_windows(reference: Reference) -> None:
    groups = len(windows_of(reference.folder, "local"))
    with start(reference.folder, "local", 24 * groups, None) as llm:
        for policy in POLICIES:
            if not find_policy(policy).cuts_prompts:
                llm.reset(policy)
                assert run(llm, GREEDY) == reference.greedy, policy


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=pytest.mark.slow if layout != "local" else ()) for layout in LAYOUTS]
)
@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_a_cache_of_8_bits_gives_the_same_tokens_in_every_layout(
    cache_dtype: Literal["int8", "fp8"], layout: str, tmp_path: Path, ray_launcher: RayLauncher
) -> None:
    """Those of one rank without preemptions, prefix cache and C++; most of them are those of the plain cache."""
    model = hf_models.make_model("llama-grouped", tmp_path)
    with start(tmp_path, "local", 500, None, False, cache_dtype, "torch") as llm:
        expected = run(llm, GREEDY)
    with start(tmp_path, layout, 24, ray_launcher, cache_dtype=cache_dtype) as llm:
        assert run(llm, GREEDY) == expected
        assert sum(r.preemptions for r in llm.record.requests) > 0
        assert sum(r.cached_tokens for r in llm.record.requests) > 0
    plain = [hf_models.greedy(model, prompt, OUTPUT) for prompt in PROMPTS]
    same = [own == true for each in zip(expected, plain, strict=True) for own, true in zip(*each, strict=True)]
    assert sum(same) / len(same) > 0.5  # a token that differs changes all that follow
