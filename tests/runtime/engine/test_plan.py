"""The plan: B by `scheduler.batch`, how many requests it lets run at once, and blocks that fit the attention."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gapless.conf.build import build, load_group
from gapless.conf.errors import ConfigError
from gapless.conf.policies import POLICY_CONFIGS
from gapless.conf.schema import CacheConfig, EngineConfig, HardwareConfig, SimulateConfig
from gapless.models.memory import MemoryModel, kv_bytes_per_token
from gapless.models.work_memory import PAGE_STEP, graph_bytes, sampler_bytes
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.engine.plan import make_plan, make_setup
from gapless.runtime.simulation.pipeline.run import simulated
from gapless.runtime.simulation.pipeline.setting import make_setting
from gapless.runtime.simulation.workload.workload import Workload

CONTEXT = 65536
SLOTS = 13  # contexts that fit beside the weights
NUM = 120  # requests


def config_of(policy: str, **keys: object) -> SimulateConfig:
    """Return the config of a model of a long context over two stages."""
    return build(
        SimulateConfig,
        {
            "model": load_group("model", "llama3-8b")
            | {"architecture": load_group("model", "llama3-8b")["architecture"] | {"max_position": CONTEXT}},
            "hardware": load_group("hardware", "a100-80g") | {"memory_gib": 60.0},
            "parallel": {"pp": 2, "launcher": "ray"},
            "scheduler": {"name": policy} | keys,
        },
    )


@pytest.mark.parametrize("policy", sorted(POLICY_CONFIGS))
def test_b_is_max_batch_and_the_slot_bound_where_it_is_asked_for(policy: str) -> None:
    plan = make_plan(config_of(policy))
    assert plan.limits.batch == 256
    assert plan.num_blocks >= SLOTS * CONTEXT / plan.block_size
    by_slots = config_of(policy, batch="slots")
    slots = MemoryModel(plan.arch, by_slots.parallel, [by_slots.hardware] * by_slots.parallel.pp, 2).slots()
    assert slots == SLOTS
    assert make_plan(by_slots).limits.batch == SLOTS // plan.limits.depth.most
    assert make_plan(replace(by_slots, scheduler=replace(by_slots.scheduler, max_batch=2))).limits.batch == 2
    assert make_plan(config_of(policy, batch=7, max_batch=3)).limits.batch == 7
    assert make_plan(config_of(policy, max_batch=9)).limits.batch == 9


def test_a_real_run_on_cuda_keeps_room_for_graphs_and_sampler() -> None:
    keys = {
        "model": load_group("model", "llama-13b") | {"max_model_len": 1024},
        "hardware": load_group("hardware", "a6000"),
        "parallel": {"pp": 1},
        "scheduler": {"name": "sarathi", "max_batch": 64},
        "cache": {"block_size": 16},
    }
    real, simulated = (make_plan(build(kind, keys)) for kind in (EngineConfig, SimulateConfig))
    work = graph_bytes(real.arch, 1, 2) + sampler_bytes(real.arch.vocab_size, 64)
    a_block = real.block_size * kv_bytes_per_token(real.arch, 40, 1, 2)
    assert simulated.num_blocks - real.num_blocks == pytest.approx(work / a_block, abs=1)
    assert real.limits.batch == simulated.limits.batch == 64


def windowed(**overrides: Any) -> SimulateConfig:
    """Return the config of Mistral 7B, whose window is 4,096 tokens, with a context of 32,768."""
    keys: dict[str, Any] = {
        "model": load_group("model", "mistral-7b") | {"max_model_len": 32_768},
        "hardware": load_group("hardware", "a100-80g") | {"memory_gib": 40.0},
        "scheduler": {"name": "equal_time"},
    }
    return build(SimulateConfig, keys | overrides)


def test_a_window_lets_more_and_longer_requests_in() -> None:
    plan, whole = make_plan(windowed()), make_plan(windowed(scheduler={"name": "request_level"}))
    assert plan.windows == make_setup(windowed(), plan).stages[0].windows == (4096,)
    promised = plan.make_pool().blocks_for(32_768)
    assert promised == 2 * 4096 // 16 + 1
    assert plan.kv_tokens == 4 * plan.num_blocks * plan.block_size
    assert whole.make_pool().blocks_for(32_768) == 32_768 // 16
    for num_blocks, room, room_whole in ((promised, 32_768, 8208), (promised - 1, 8192, 8192), (100, 1600, 1600)):
        cache = CacheConfig(block_size=16, num_blocks=num_blocks)
        assert make_plan(replace(windowed(), cache=cache)).room == room
        assert make_plan(replace(windowed(scheduler={"name": "orca_worst"}), cache=cache)).room == room_whole


@pytest.mark.parametrize("policy", sorted(POLICY_CONFIGS))
def test_short_requests_of_a_long_context_run_together(policy: str) -> None:
    """By slots a fraction of the KV cache is used, and a run takes longer."""
    workload = Workload(
        input_lens=np.full(NUM, 400), output_lens=np.full(NUM, 60), arrivals=np.zeros(NUM), vocab_size=100, seed=0
    )
    seconds = {}
    for batch in (None, "slots"):
        (replica,) = simulated(make_setting(config_of(policy, batch=batch)), workload)
        summary = summarize(Fleet([replica.record]))
        assert (summary["completed"], summary["batch"]) == (NUM, replica.coordinator.scheduler.limits.batch)
        assert summary["depth"] == replica.coordinator.scheduler.limits.depth.most
        seconds[batch] = summary["duration"]
    assert seconds[None] < seconds["slots"]


def stages_of(devices: list[str] | None, **parallel: object) -> list[int]:
    config = config_of("sarathi")
    config = replace(
        config,
        parallel=replace(config.parallel, **parallel),  # type: ignore[arg-type]
        simulation=replace(config.simulation, devices=devices and tuple(devices)),
    )
    return [len(layers) for layers in make_plan(config).layers]


def test_the_default_split_weighs_the_speed_of_the_stages() -> None:
    assert stages_of(None) == stages_of(["a100-80g", "a100-80g"]) == [16, 16]
    fast_last, fast_first = stages_of(["a100-80g", "h100"]), stages_of(["h100", "a100-80g"])
    assert fast_last == [11, 21]
    assert fast_first[0] >= 21
    assert stages_of(None, stage_speeds=(1.0, 3.0)) == [8, 24]
    assert stages_of(["a100-80g", "h100"], layers=(16, 16)) == [16, 16]


def two_unlike(model: str, first: str, last: str, **parallel: object) -> SimulateConfig:
    config = build(
        SimulateConfig,
        {
            "model": load_group("model", model),
            "hardware": load_group("hardware", first),
            "parallel": {"pp": 2, "launcher": "ray"} | parallel,
            "scheduler": {"name": "sarathi"},
        },
    )
    return replace(config, simulation=replace(config.simulation, devices=(first, last)))


def split_of(config: SimulateConfig) -> tuple[int, int]:
    slow, fast = (len(layers) for layers in make_plan(config).layers)
    return slow, fast


def test_a_stage_of_little_memory_takes_the_layers_that_fit() -> None:
    """The A6000 is the faster one by the given speeds, and has 38.65 GiB: 24 layers of 1.6 GiB fit, not 64."""
    config = two_unlike("llama2-70b", "a6000", "h200", stage_speeds=[4.0, 1.0])
    weights = make_plan(config).arch.layer_params * 2
    few, many = split_of(config)
    assert few * weights < config.hardware.memory_gib * 2**30 < (80 * 4 / 5) * weights
    assert few + many == 80


def test_a_faster_stage_takes_no_more_layers_than_fit_where_memories_are_alike() -> None:
    """By speed alone the second stage would take 52 of 80 layers, and its weights alone 87 GiB of 67."""
    mixed = two_unlike("llama2-70b", "a100-80g", "h100")
    alike = replace(mixed, simulation=replace(mixed.simulation, devices=None))
    given = replace(alike, parallel=replace(alike.parallel, stage_speeds=(1.0, 3.0)))
    assert split_of(mixed) == split_of(given) == split_of(alike) == (40, 40)


@pytest.mark.parametrize(
    ("model", "first", "tp"),
    [
        ("llama2-70b", "a100-80g", 1),
        ("llama-33b", "a100-80g", 1),
        ("llama-33b", "a6000", 1),
        ("llama2-70b", "a6000", 2),
    ],
)
def test_a_split_by_speed_leaves_room_for_sequences(model: str, first: str, tp: int) -> None:
    """It leaves 16 K tokens a stage, or as many as any split leaves where that is less, and never fewer for speed."""
    config = two_unlike(model, first, "h100", tp=tp)
    slow, fast = split_of(config)
    assert fast >= slow

    def tokens(slow: int) -> int:
        layers = (slow, make_plan(config).arch.num_layers - slow)
        with suppress(ConfigError):
            return make_plan(replace(config, parallel=replace(config.parallel, layers=layers))).num_blocks * 16
        return 0

    most = max(tokens(each) for each in range(1, slow + fast))
    assert tokens(slow) >= min(most, 2 * 16_384)


def test_a_split_by_speed_is_about_as_fast_as_the_fastest() -> None:
    """With one context's room LLaMA 33B would have 13 layers on the A100 and take 1.6 times as long as it does."""
    rng = np.random.default_rng(0)
    workload = Workload(
        input_lens=rng.integers(100, 900, NUM),
        output_lens=rng.integers(20, 300, NUM),
        arrivals=np.zeros(NUM),
        vocab_size=100,
        seed=0,
    )
    config = two_unlike("llama-33b", "a100-80g", "h100")

    def seconds(layers: tuple[int, int] | None) -> float:
        (replica,) = simulated(
            make_setting(replace(config, parallel=replace(config.parallel, layers=layers))), workload
        )
        return float(summarize(Fleet([replica.record]))["duration"])

    assert seconds(None) < 1.1 * min(seconds((slow, 60 - slow)) for slow in range(14, 32, 2))


def engine(device: Any, **model: Any) -> EngineConfig:
    return build(EngineConfig, {"model": load_group("model", "tiny") | model, "hardware": {"device": device}})


def test_blocks_are_pages_where_flash_runs() -> None:
    for model in ({}, {"attention": "flash"}, {"dtype": "float16"}):
        size = engine("cuda", **model).block_size
        assert size == 256
        assert size % PAGE_STEP == 0
    for model in ({"attention": "xformers"}, {"attention": "sdpa"}, {"dtype": "float32"}):
        assert engine("cuda", **model).block_size == 16
    assert engine("cpu").block_size == 16
    own = replace(engine("cuda"), cache=CacheConfig(block_size=32))
    assert own.block_size == 32
    assert replace(engine("cuda"), cache=CacheConfig(dtype="int8")).block_size == 16  # read by sdpa
    assert make_plan(engine("cuda")).block_size == 256


@pytest.mark.parametrize("name", ["flash", "xformers"])
def test_a_backend_that_cannot_run_is_refused_before_a_start(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.attention={name}: runs on CUDA only; use sdpa or auto on hardware"):
        make_plan(engine("cpu", attention=name))
    with pytest.raises(ConfigError, match=f"^model.attention={name}: runs in bfloat16 and float16; use sdpa or auto"):
        make_plan(engine("cuda", attention=name, dtype="float32"))


@pytest.mark.parametrize("name", ["flash", "xformers"])
@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_a_cache_of_8_bits_is_counted_and_its_readers_are_known(name: str, cache_dtype: Any) -> None:
    config = replace(engine("cuda", attention=name), cache=CacheConfig(dtype=cache_dtype))
    wanted = f"^cache.dtype={cache_dtype}: model.attention={name} reads keys in the model's dtype; use sdpa or auto$"
    with pytest.raises(ConfigError, match=wanted):
        make_plan(config)
    small = replace(engine("cpu"), hardware=HardwareConfig(memory_gib=0.02))
    plain, own = (make_plan(replace(small, cache=CacheConfig(dtype=each))) for each in ("auto", cache_dtype))
    assert own.num_blocks > 2.5 * plain.num_blocks  # of float32
    assert make_setup(replace(small, cache=CacheConfig(dtype=cache_dtype)), own).stages[0].cache_dtype == cache_dtype


def test_experts_and_latent_attention_can_be_rounded() -> None:
    """A rank then holds experts in 8 bits, whole or in slices; latent attention stays as it is."""
    arch = {
        **{"vocab_size": 64, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 1, "head_dim": 40},
        **{"ffn_size": 128, "max_position": 64, "family": "deepseek"},
        "experts": {"num_experts": 4, "experts_per_token": 2, "ffn_size": 64},
        "latent": {"rank": 32, "rotary_dim": 8, "head_dim": 16, "value_dim": 16},
    }
    for whole, columns in ((False, 32), (True, 64)):
        grid = {"tp": 2, "launcher": "ray", "expert_parallel": whole}
        model = {"architecture": arch, "quantization": "int8"}
        formats = make_plan(build(EngineConfig, {"model": model, "parallel": grid})).formats
        assert formats is not None
        own = formats.layers[1]
        assert own.qkv is None
        assert own.experts is not None
        assert [each.group for each in own.experts] == [64, columns]
