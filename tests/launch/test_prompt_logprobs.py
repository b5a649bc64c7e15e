"""Log-probabilities of prompts are those of `transformers`, in several chunks, over ranks and after a preemption."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from gapless import LLM
from gapless.conf.policies import SarathiConfig
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from gapless.launch.ray_launcher import RayLauncher
from gapless.runtime.engine.outputs import RequestOutput
from tests.support import hf_models

PROMPTS = [[random.Random(n).randrange(hf_models.VOCAB) for _ in range(n)] for n in (37, 36, 5, 64, 1, 50)]
TOP = 3
PARAMS = [
    SamplingParams(max_tokens=14, ignore_eos=True, prompt_logprobs=top, logprobs=0)
    for top in (TOP, TOP, None, TOP, TOP, 0)
]
Expected = list[list[tuple[float, list[int]]]]  # by prompt and token: its log-probability, and the best tokens


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    folder = tmp_path_factory.mktemp("llama")
    model = hf_models.make_model("llama", folder)
    expected: Expected = []
    for prompt in PROMPTS:
        with torch.no_grad():
            scores = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        best = scores.topk(TOP).indices.tolist()
        own = scores.gather(1, torch.tensor(prompt[1:], dtype=torch.int64).unsqueeze(1)).squeeze(1).tolist()
        expected.append(list(zip(own, best, strict=True)))
    return folder, expected


def run(
    folder: Path, num_blocks: int, pp: int, tp: int, launcher: RayLauncher | None
) -> tuple[list[RequestOutput], int]:
    """Return the outputs, and how often a request was preempted."""
    config = EngineConfig(
        model=ModelConfig(weights=str(folder), tokenizer="none"),
        parallel=ParallelConfig(pp=pp, tp=tp, launcher="local" if launcher is None else "ray", threads=1),
        scheduler=SarathiConfig(chunk=7, tile=1, batch=3),
        cache=CacheConfig(block_size=4, num_blocks=num_blocks),
    )
    with LLM.from_config(config, launcher=launcher) as llm:
        found = llm.generate(PROMPTS, PARAMS)
        plain = llm.generate(PROMPTS, SamplingParams(max_tokens=14, ignore_eos=True))
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in plain]
        return found, sum(r.preemptions for r in llm.record.requests)


def check(outputs: list[RequestOutput], expected: Expected) -> None:
    for prompt, params, output, of_prompt in zip(PROMPTS, PARAMS, outputs, expected, strict=True):
        if params.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        for token, found, (value, best) in zip(prompt[1:], others, of_prompt, strict=True):
            assert found is not None
            assert found[token].logprob == pytest.approx(value, abs=1e-4)
            ranked = sorted(found, key=lambda number: found[number].rank or 0)
            assert ranked[: params.prompt_logprobs] == best[: params.prompt_logprobs]
            assert set(found) <= {token, *best}


def test_one_rank(reference: tuple[Path, Expected]) -> None:
    folder, expected = reference
    roomy, _ = run(folder, 500, 1, 1, None)
    check(roomy, expected)
    tight, preemptions = run(folder, 24, 1, 1, None)
    check(tight, expected)
    assert preemptions > 0


@pytest.mark.slow
def test_two_stages_of_two_ranks(reference: tuple[Path, Expected], ray_launcher: RayLauncher) -> None:
    folder, expected = reference
    outputs, _ = run(folder, 500, 2, 2, ray_launcher)
    check(outputs, expected)
