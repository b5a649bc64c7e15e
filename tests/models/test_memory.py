"""The memory model gives the paper's slot bound, the minimum over the stages, and what real stages allocate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from gapless.conf.architecture import Architecture
from gapless.conf.build import build, load_group
from gapless.conf.errors import ConfigError
from gapless.conf.experts import ExpertsConfig
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import HardwareConfig, ModelConfig, ParallelConfig
from gapless.models.attention import flash
from gapless.models.build_stage import build_stage
from gapless.models.experts.routed import RoutedExperts
from gapless.models.graphed_stage import GraphedStage
from gapless.models.memory import MemoryModel, kv_bytes_per_token, weight_bytes
from gapless.models.quantization.formats import model_formats, rounded_formats
from gapless.models.sampling import Sampler
from gapless.models.stage_spec import StageSpec
from gapless.models.work_memory import graph_bytes, sampler_bytes
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support.active_params import active_params
from tests.support.fake_cuda import CUDA, FakeCuda
from tests.support.live_bytes import LiveBytes
from tests.support.lone_rank import LLAMA, lone_stage

GIB = 1 << 30
SMALL = Architecture(
    vocab_size=1024,
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    max_position=512,
)


def memory(arch: Architecture, hardware: HardwareConfig, *, element: int = 4, **parallel: Any) -> MemoryModel:
    grid = ParallelConfig(launcher="ray", **parallel)
    return MemoryModel(arch, grid, [hardware] * grid.pp, element)


def shape(name: str, length: int) -> Architecture:
    arch = build(ModelConfig, load_group("model", name), "model").architecture
    assert arch is not None
    return dataclasses.replace(arch, max_position=length)


@pytest.mark.parametrize(
    ("model", "memory_gib", "length", "batch"),
    [
        ("llama-13b", 38.65, 1024, 18),  # an A6000 of 48 GiB: section 3.1
        ("llama-13b", 38.65, 3072, 6),  # Table 4, and those below
        ("llama-33b", 76.0, 1024, 10),  # an A100 of 80 GiB
        ("llama-33b", 76.0, 2048, 5),
        ("llama-33b", 76.0, 3072, 3),
    ],
)
def test_the_papers_batch_sizes(model: str, memory_gib: float, length: int, batch: int) -> None:
    gpu = HardwareConfig(device="cuda", memory_gib=memory_gib)
    assert memory(shape(model, length), gpu, element=2).slots() == batch


def test_m_kv_of_llama_13b() -> None:
    assert kv_bytes_per_token(shape("llama-13b", 1024), 40, 1, 2) == 2 * 40 * 5120 * 2
    assert kv_bytes_per_token(shape("llama-13b", 1024), 10, 4, 2) == 2 * 10 * 1280 * 2


@pytest.mark.parametrize("tie", [False, True])
def test_weights_are_counted_on_the_stages_that_hold_them(tie: bool) -> None:
    arch = dataclasses.replace(SMALL, tie_embeddings=tie)
    whole = weight_bytes(arch, Mesh(1, 1), range(4), 4)
    assert whole == 4 * arch.num_params
    first = weight_bytes(arch, Mesh(2, 1, 0), range(2), 4)
    last = weight_bytes(arch, Mesh(2, 1, 1), range(2, 4), 4)
    assert first + last - whole == (4 * arch.embedding_params if tie else 0)
    assert weight_bytes(arch, Mesh(1, 2, 1), range(4), 4) * 2 == whole
    sliced, replicated = (
        weight_bytes(arch, Mesh(2, 2, 1), range(2), 4, replicate_embedding=each) for each in (False, True)
    )
    assert replicated - sliced == 2 * arch.embedding_params


def test_the_embedding_is_replicated_where_that_takes_little() -> None:
    little, much = (HardwareConfig(memory_gib=50 * share * 2 * SMALL.embedding_params / GIB) for share in (1.01, 0.99))
    for pp, tp, hardware, told, expected in (
        (2, 2, little, None, True),
        (2, 2, much, None, False),
        (2, 2, much, True, True),
        (2, 2, little, False, False),
        (1, 2, little, True, False),  # one stage waits for nobody, and its head may be the same slice
        (2, 1, little, True, False),
    ):
        assert memory(SMALL, hardware, pp=pp, tp=tp, replicate_embedding=told).replicates_embedding() == expected


@pytest.mark.parametrize(("tie", "cache_dtype"), [(False, "auto"), (True, "auto"), (False, "int8"), (False, "fp8")])
def test_a_real_stage_takes_what_the_model_says(tie: bool, cache_dtype: str) -> None:
    arch = dataclasses.replace(SMALL, tie_embeddings=tie)
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 30) as groups:
        model = ModelConfig(architecture=arch)
        spec = StageSpec(model=model, arch=arch, layers=(0, 4), num_blocks=8, block_size=16, cache_dtype=cache_dtype)
        stage = build_stage(spec, groups)
        weights = sum(p.numel() * p.element_size() for p in stage.parameters())
        cache = sum(t.numel() * t.element_size() for t in [*stage.cache.keys, *stage.cache.values])
    assert weights == pytest.approx(weight_bytes(arch, Mesh(1, 1), range(4), 4), rel=0.01)  # norms are left out
    assert cache == (8 + 1) * 16 * kv_bytes_per_token(
        arch, 4, 1, 4, cache_dtype
    )  # one block more, for rows that only pad


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("tie", [False, True])
def test_a_stage_of_quantized_weights_takes_what_the_model_says(tie: bool, kind: Any) -> None:
    arch = dataclasses.replace(SMALL, tie_embeddings=tie)
    formats = model_formats(rounded_formats(kind, arch), arch, 1, "cpu")
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 30) as groups:
        model = ModelConfig(architecture=arch, quantization=kind)
        spec = StageSpec(model=model, arch=arch, layers=(0, 4), num_blocks=8, block_size=16)
        stage = build_stage(spec, groups)
    layers = [layer for layer in stage.modules() if getattr(layer, "quantized", None) is not None]
    assert len(layers) == 4 * 4 + (1 if tie else 2)
    matrices = [layer.quantized for layer in layers]
    tensors = [tensor for each in matrices for tensor in (each.codes, each.scales, each.offsets) if tensor is not None]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert held == weight_bytes(arch, Mesh(1, 1), range(4), 4, formats=formats)
    assert held < (0.4 if kind == "int8" else 0.3) * weight_bytes(arch, Mesh(1, 1), range(4), 4)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_stage_of_quantized_experts_takes_what_the_model_says(kind: Any) -> None:
    """Experts and the shared one are quantized, and the router is not."""
    experts = ExpertsConfig(num_experts=8, experts_per_token=2, ffn_size=96, shared_ffn_size=64)
    arch = dataclasses.replace(SMALL, experts=experts)
    formats = model_formats(rounded_formats(kind, arch), arch, 1, "cpu")
    assert formats.layers[0].experts is not None
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 30) as groups:
        model = ModelConfig(architecture=arch, quantization=kind)
        spec = StageSpec(model=model, arch=arch, layers=(0, 4), num_blocks=8, block_size=16)
        stage = build_stage(spec, groups)
    matrices = [layer.quantized for layer in stage.modules() if getattr(layer, "quantized", None) is not None]
    for layer in stage.modules():
        if isinstance(layer, RoutedExperts):
            matrices += [matrix for i in range(8) for matrix in layer.weights(i)]
    tensors = [tensor for each in matrices for tensor in (each.codes, each.scales, each.offsets) if tensor is not None]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert held + 4 * 8 * 64 * 4 == weight_bytes(arch, Mesh(1, 1), range(4), 4, formats=formats)


def test_blocks_are_the_minimum_over_the_stages() -> None:
    hardware = HardwareConfig(memory_gib=0.01)
    counts = {layers: memory(SMALL, hardware, pp=2, layers=layers).blocks(16) for layers in ((2, 2), (1, 3), (3, 1))}
    assert counts[2, 2] > counts[1, 3] == counts[3, 1]
    available = int(0.01 * GIB) - weight_bytes(SMALL, Mesh(2, 1, 1), range(2, 4), 4)
    assert counts[2, 2] == available // (16 * kv_bytes_per_token(SMALL, 2, 1, 4))


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_a_cache_of_8_bits_holds_twice_the_blocks(cache_dtype: str) -> None:
    arch = dataclasses.replace(SMALL, head_dim=128)
    counts = [
        MemoryModel(arch, ParallelConfig(), [HardwareConfig(memory_gib=0.1)], 2, cache_dtype=each).blocks(16)
        for each in ("auto", cache_dtype)
    ]
    assert counts[1] / counts[0] == pytest.approx(256 / (128 + 4), rel=0.01)  # bytes of a row: 4 are its scale's


def test_too_little_memory_is_one_line() -> None:
    for gib, said in ((0.0005, "weights of stage 0 alone"), (0.0012, "one sequence of 512 tokens")):
        small = memory(SMALL, HardwareConfig(memory_gib=gib))
        for bound in (small.slots, partial(small.blocks, 16)):
            with pytest.raises(ConfigError, match=f"hardware.memory_gib={gib:g}: .*{said}") as caught:
                bound()
            assert "\n" not in str(caught.value)


def test_blocks_that_are_asked_for_must_fit() -> None:
    room = memory(SMALL, HardwareConfig(memory_gib=0.01))
    most = room.blocks(16)
    room.check_blocks(16, most)
    with pytest.raises(ConfigError, match=rf"and {most + 1} KV blocks of 16 tokens; .*lower cache\.num_blocks"):
        room.check_blocks(16, most + 1)
    with pytest.raises(ConfigError, match="weights of stage 0 alone"):
        memory(SMALL, HardwareConfig(memory_gib=0.0005)).check_blocks(16, 1)


def test_ranks_hold_as_much_of_the_experts_whether_sliced_or_whole() -> None:
    """Half of attention and experts, all of the router, and as many bytes under expert parallelism."""
    arch = dataclasses.replace(SMALL, experts=ExpertsConfig(num_experts=8, experts_per_token=2, shared_ffn_size=64))
    expert, shared, attention = 3 * 64 * 128, 3 * 64 * 64, 64 * 16 * (4 + 2 * 2) + 4 * 16 * 64
    assert arch.layer_params == attention + 8 * expert + shared + 64 * 8
    assert arch.num_params - active_params(arch) == 4 * 6 * expert
    one = weight_bytes(arch, Mesh(3, 2, 2), range(1), 2)
    assert one == 2 * ((attention + 8 * expert + shared) // 2 + 64 * 8)
    gpu = HardwareConfig(device="cuda", memory_gib=0.1)
    blocks = [memory(arch, gpu, element=2, tp=2, expert_parallel=whole).blocks(16) for whole in (False, True)]
    assert blocks[0] == blocks[1] < memory(SMALL, gpu, element=2, tp=2).blocks(16)


def test_ranks_copy_kv_heads_where_there_are_fewer() -> None:
    bytes_per_token = [kv_bytes_per_token(SMALL, 4, tp, 2) for tp in (1, 2, 4)]
    assert bytes_per_token == [2 * 4 * heads * 16 * 2 for heads in (2, 1, 1)]
    split, copied = (weight_bytes(SMALL, Mesh(3, tp, tp), range(1), 2) for tp in (2, 4))
    assert 2 * copied == split + 2 * 2 * 64 * 16  # keys' and values' weights of one head do not halve


@pytest.mark.parametrize(
    ("model", "total", "active"),  # billions, as their reports say
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("mixtral-8x22b", 141, 39),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
    ],
)
def test_models_of_experts_have_their_published_sizes(model: str, total: float, active: float) -> None:
    arch = shape(model, 1024)
    assert arch.num_params / 1e9 == pytest.approx(total, rel=0.003)
    assert active_params(arch) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_graphs_take_what_the_model_says(gated: bool, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "probe", lambda *_, **__: None)
    arch = dataclasses.replace(
        LLAMA, hidden_size=1024, num_heads=16, head_dim=64, ffn_size=2816, max_position=4096, gated_ffn=gated
    )

    def run_all(works: Sequence[Callable[[], None]]) -> Sequence[Callable[[], None]]:
        for work in works:
            work()
        return works

    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60), FakeCuda() as cuda:
        with cuda.may_wait():
            stage = lone_stage(arch, Mesh(3, tp, tp), CUDA, torch.bfloat16, 16, attention="flash", block_size=256)
        with LiveBytes() as live:
            GraphedStage(stage, run_all)
    assert 0.75 <= live.peak / graph_bytes(arch, tp, 2) <= 1


SAMPLED = [SamplingParams(), SamplingParams(temperature=0.8, top_k=50, top_p=0.9, logprobs=20)]
FULLEST = SamplingParams(temperature=0.8, top_p=0.95, min_p=0.1, repetition_penalty=1.1, logprobs=5)


@pytest.mark.parametrize(
    ("vocab_size", "num_rows"), [(128256, 256), (128256, 600), (32000, 64), (4000, 256), (32000, 1)]
)
@pytest.mark.parametrize("params", [*SAMPLED, FULLEST], ids=["greedy", "top_k", "top_p"])
def test_the_sampler_takes_at_most_what_the_model_says(params: SamplingParams, vocab_size: int, num_rows: int) -> None:
    sampler = Sampler(vocab_size)
    for request in range(num_rows):
        # One that is drawn otherwise has the logits of the others copied together.
        sampler.add(request, params if request or num_rows == 1 else SamplingParams(), 7, 2, (3,))
        sampler.feed(request, 0, [5, 5, 8])
    with FakeCuda(), LiveBytes() as live:
        logits = torch.empty(num_rows, vocab_size, device=CUDA)
        sampler.queue(logits, range(num_rows), [3] * num_rows)
    share = live.peak / sampler_bytes(vocab_size, num_rows)
    assert share <= 1
    assert params is not FULLEST or share >= 0.6


def test_work_memory_leaves_fewer_blocks_and_the_papers_batch_as_it_is() -> None:
    gpu = HardwareConfig(device="cuda", memory_gib=1.0)
    plain = memory(SMALL, gpu, element=2, pp=2)
    real = dataclasses.replace(plain, max_rows=256)
    work = graph_bytes(SMALL, 1, 2) + sampler_bytes(SMALL.vocab_size, 256)
    a_block = 16 * kv_bytes_per_token(SMALL, 2, 1, 2)
    assert plain.blocks(16) - real.blocks(16) == pytest.approx(work / a_block, abs=1)
    assert real.slots() == plain.slots()
    assert real.most_layers(16)[1] < plain.most_layers(16)[1]
    with pytest.raises(ConfigError, match="the weights and work memory of stage 1 alone take"):
        dataclasses.replace(real, max_rows=1 << 20).blocks(16)
