"""What a rank's device gives is measured where weights are large enough for it to matter."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from gapless.conf.build import build, load_group
from gapless.conf.schema import ModelConfig
from gapless.kernels import processor
from gapless.models.stage_spec import StageSpec
from gapless.parallel.mesh import Mesh
from gapless.runtime.core.stage_floor import StageMachine
from gapless.runtime.pipeline import measure_machine as measuring
from gapless.runtime.pipeline.measure_machine import measure_machine, slow_reason
from tests.support.fake_cuda import CUDA, FakeCuda
from tests.support.lone_rank import LLAMA, lone_stage, stage_specs

CPU = torch.device("cpu")


def spec(stage: int, model: str = "tiny", **changes: object) -> StageSpec:
    """Return one of two stages, the second of which has one layer."""
    config = replace(build(ModelConfig, load_group("model", model), "model"), dtype="float32", **changes)  # type: ignore[arg-type]
    assert config.architecture is not None
    layers = [
        (0, config.architecture.num_layers - 1),
        (config.architecture.num_layers - 1, config.architecture.num_layers),
    ]
    return stage_specs(config, layers, 20, 4)[stage]


def test_few_weights_are_not_worth_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_measured", lambda *_: StageMachine({"float32": 1.0}, 1.0))
    assert not measure_machine(spec(0), Mesh(2, 1, 0), CPU).is_known
    large = spec(1, "llama-13b")
    assert measure_machine(large, Mesh(2, 1, 1), CPU).is_known
    monkeypatch.setattr(measuring, "_free_bytes", lambda _: 100 << 20)
    assert not measure_machine(large, Mesh(2, 1, 1), CPU).is_known


def test_a_processor_that_does_not_multiply_bfloat16_is_measured_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_measured", lambda device, dtype, threads: StageMachine({dtype: 1.0}, 1.0))
    large = spec(0, "llama-13b")
    short = msgspec.structs.replace(large, model=replace(large.model, dtype="bfloat16"))
    for multiplies, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(processor, "multiplies_bfloat16", lambda multiplies=multiplies: multiplies)
        assert measure_machine(short, Mesh(2, 1, 0), CPU).gemm_tflops == {dtype: 1.0}


@pytest.mark.slow
def test_this_processor() -> None:
    """It leaves the number of threads as it was, and is no supercomputer."""
    threads = torch.get_num_threads()
    found = measuring._measured.__wrapped__(CPU, "float32", threads)
    assert torch.get_num_threads() == threads
    assert 1e-4 < found.gemm_tflops["float32"] < 100
    assert 0.1 < found.memory_gigabytes_per_s < 2000


def test_a_gpu_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "stream"

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return 4.0  # ms

    with FakeCuda() as cuda, cuda.may_wait():
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        found = measuring._measured.__wrapped__(CUDA, "bfloat16", 1)
    assert found.gemm_tflops["bfloat16"] in [2e-12 * side**3 / 4e-3 for side in (1024, 2048, 4096, 8192)]
    assert found.memory_gigabytes_per_s == pytest.approx(1e-9 * (512 << 20) / 4e-3)


def test_why_a_stage_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lone_stage(LLAMA, Mesh(1, 1), CPU, torch.float32, 4, kernels="torch")
    made = lone_stage(LLAMA, Mesh(1, 1), CPU, torch.float32, 4)
    made.fallback_reason = ""
    assert slow_reason(made) == ""
    assert slow_reason(plain) == "model.kernels=torch disables the C++ kernels"
    made.fallback_reason = "no compiler; install GCC"
    level = processor.level()
    assert level is not None
    assert slow_reason(made) == f"this build has no kernels for its instruction set, {level.name}"
    monkeypatch.setattr(processor, "level", lambda: None)
    made.fallback_reason = processor.lacking()
    assert slow_reason(made) == made.fallback_reason
