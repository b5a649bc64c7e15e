"""`engine=NAME` gives a simulation an engine's defaults, over which given keys hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gapless.conf.build import group_names
from gapless.conf.errors import ConfigError
from gapless.conf.policies import PrefillFirstConfig, SarathiConfig, TokenBudgetConfig
from gapless.conf.schema import ParallelConfig, SimulateConfig
from gapless.conf.tuning import CapacityConfig, TuneConfig
from gapless.launch.cli import main
from gapless.launch.compose import compose_all, compose_one
from gapless.launch.overrides import overrides
from tests.support.tiers import first_quick


def composed(*words: str) -> SimulateConfig:
    return compose_one(words, SimulateConfig, "simulate")


@pytest.mark.parametrize("engine", group_names("engine"))
@pytest.mark.parametrize("hardware", first_quick(["h200", "a100-80g", "a6000"]))
def test_every_key_of_an_engine_is_one_of_a_simulation_or_a_search(engine: str, hardware: str) -> None:
    words = [f"engine={engine}", f"hardware={hardware}"]
    config = composed(*words)
    assert config.engine == engine
    assert config == replace(composed(*overrides(config, "simulate")), engine=engine), "its keys stand by themselves"
    for cls, command in ((CapacityConfig, "capacity"), (TuneConfig, "tune")):
        searched = compose_one(words, cls, command)
        assert (searched.engine, searched.scheduler, searched.policies) == (engine, config.scheduler, ())


def test_an_engine_s_defaults_follow_the_hardware_and_yield_to_keys() -> None:
    assert composed("engine=vllm", "hardware=h200").scheduler == TokenBudgetConfig(
        max_batched_tokens=8192, max_batch=1024
    )
    assert composed("engine=vllm").scheduler == TokenBudgetConfig(max_batched_tokens=2048, max_batch=256)
    assert composed("engine=sglang").scheduler == PrefillFirstConfig(max_prefill_tokens=8192, max_batch=4096)
    own = composed("engine=vllm", "hardware=h200", "scheduler.max_batch=7", "parallel.layers=null")
    assert own.parallel.depth == 1
    assert (own.scheduler, own.parallel.layers) == (TokenBudgetConfig(max_batched_tokens=8192, max_batch=7), None)
    other = composed("engine=vllm", "scheduler=sarathi", "cache.block_size=64")
    assert (other.scheduler, other.cache.block_size, other.parallel.layers) == (SarathiConfig(), 64, "middle")
    policies = composed("engine=trtllm", "scheduler=sarathi,token_budget").policies
    assert policies == (SarathiConfig(), TokenBudgetConfig())
    tuned = compose_one(["engine=vllm", "search.chunk=[64]"], TuneConfig, "tune")
    assert tuned.search.chunk == (64,)
    assert compose_one(["engine=vllm"], TuneConfig, "tune").search.chunk == (512, 2048, 8192)


def test_engines_are_swept() -> None:
    words = ["engine=vllm,sglang", "hardware=h200,a100-80g"]
    points = [point.config for point in compose_all(words, SimulateConfig, "simulate", multirun=True)]
    assert [(point.engine, point.hardware.name, point.scheduler.name) for point in points] == [
        ("vllm", "h200", "token_budget"),
        ("vllm", "a100-80g", "token_budget"),
        ("sglang", "h200", "prefill_first"),
        ("sglang", "a100-80g", "prefill_first"),
    ]


def test_an_unknown_engine_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^engine=vlm: unknown; did you mean 'vllm'\?$"):
        composed("engine=vlm")


@pytest.mark.parametrize(
    ("rule", "layers", "split"),
    [
        ("middle", 28, (3, 3, 3, 4, 4, 4, 4, 3)),
        ("middle", 36, (4, 4, 4, 5, 5, 5, 5, 4)),
        ("first", 36, (5, 5, 5, 5, 4, 4, 4, 4)),
        ("last", 36, (4, 4, 4, 4, 5, 5, 5, 5)),
        ("middle", 32, (4,) * 8),
    ],
)
def test_layers_left_over_go_where_the_engine_puts_them(rule: str, layers: int, split: tuple[int, ...]) -> None:
    assert ParallelConfig(pp=8, layers=rule).layer_counts(layers) == split  # type: ignore[arg-type]


def test_a_run_takes_the_split_and_says_whose_defaults_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=llama-13b", "parallel=pp8", "workload=fixed", "workload.num_prompts=4", "workload.input_len=64"]
    assert main(["simulate", "engine=trtllm", *words, "hydra.run.dir=run"]) == 0
    assert "engine: trtllm" in (tmp_path / "run/.hydra/config.yaml").read_text(encoding="utf-8")
    assert main(["explain", "run", "seconds=1"]) == 0
    assert "layers" not in capfd.readouterr().err
