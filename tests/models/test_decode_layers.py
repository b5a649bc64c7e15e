"""Decodes alone by one C++ call give what the layers give one by one, to the bit, and only layers that C++ knows do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from gapless.conf.architecture import Architecture, LayerKind
from gapless.conf.schema import ModelConfig
from gapless.kernels.cpp_product import CppProduct
from gapless.kernels.operators.cpp import CppKernels
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.build_stage import build_stage
from gapless.models.decoder import DecoderLayer, FeedForward
from gapless.models.stage import Stage
from gapless.models.stage_spec import StageSpec
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support.forked_ranks import run_ranks
from tests.support.lone_rank import ARCHITECTURES, MIXED

LLAMA = Architecture(
    vocab_size=61,
    hidden_size=256,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    ffn_size=512,
    max_position=64,
)
PLAIN = {
    "llama": LLAMA,
    "biases, layer norm": dataclasses.replace(
        LLAMA, norm="layer", qkv_bias=True, attention_out_bias=True, ffn_bias=True
    ),
    "head norm": dataclasses.replace(LLAMA, qk_norm=True, rotary_dim=16),
    "windows": dataclasses.replace(
        LLAMA, layers=(LayerKind(window=6), LayerKind(rope=False), LayerKind(rope_theta=100.0))
    ),
}
PROMPTS = [Segment(0, 11, [3, 1, 0]), Segment(0, 4, [2]), Segment(0, 9, [5, 4, 6])]


def make(arch: Architecture, dtype: str, quantization: str | None, groups: Groups, cache: str = "auto") -> Stage:
    model = ModelConfig(architecture=arch, dtype=dtype, quantization=quantization)  # type: ignore[arg-type]
    layers = (0, arch.num_layers)
    spec = StageSpec(model=model, arch=arch, layers=layers, num_blocks=9, block_size=4, seed=3, cache_dtype=cache)
    stage = build_stage(spec, groups)
    stage.pack()
    if not isinstance(stage._kernels, CppKernels):
        pytest.skip("needs a C++ compiler")
    return stage


def outputs(stage: Stage) -> list[torch.Tensor]:
    """Return the logits of prompts, and of a decode or three after them, three times, and the cache."""
    prompts = RaggedBatch.of(list(range(24)), PROMPTS, [], [10, 14, 23])
    found = [stage(stage.prepare(prompts))]
    for more in range(3):
        decodes = [Segment(each.length + more // 2, 1, [*each.blocks, 7 + n % 2]) for n, each in enumerate(PROMPTS)]
        some = decodes[: 1 if more == 0 else 3]
        batch = RaggedBatch.of(list(range(5, 5 + len(some))), [], some, list(range(len(some))))
        found.append(stage(stage.prepare(batch)))
    written = torch.tensor(
        [slot for segment in PROMPTS for block in segment.blocks for slot in range(4 * block, 4 * block + 4)]
    )
    keys = [each[written[:8]].float() for each in stage.cache.keys]
    return [*found, *keys]


def compare(groups: Groups, arch: Architecture, dtype: str, quantization: str | None, cache: str = "auto") -> None:
    together, apart = (make(arch, dtype, quantization, groups, cache) for _ in range(2))
    assert together.decodes is not None
    calls = []
    compute = together.decodes.compute
    together.decodes.compute = lambda *given: calls.append(len(given[0])) or compute(*given)  # type: ignore
    apart.decodes = None
    for found, expected in zip(outputs(together), outputs(apart), strict=True):
        assert found.isfinite().all()
        assert found.equal(expected)
    assert calls == [1, 3, 3]


CASES = [
    ("llama", "float32", None),
    ("llama", "float32", "int4"),
    ("biases, layer norm", "float32", "int8"),
    ("head norm", "float32", None),
    ("windows", "float32", "int4"),
]


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)  # of more, each would have too few of the outputs of these sizes


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("name", "dtype", "quantization"), [*CASES, ("llama", "bfloat16", "int4")])
def test_they_give_what_layers_give(name: str, dtype: str, quantization: str | None) -> None:
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        if dtype == "bfloat16" and torch.cpu._is_amx_tile_supported():
            pytest.skip("attention of bfloat16 is that of AMX here")
        compare(groups, PLAIN[name], dtype, quantization)


@pytest.mark.usefixtures("one_thread")
def test_a_cache_of_8_bits() -> None:
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        compare(groups, LLAMA, "float32", "int4", "int8")


def check_all(groups: Groups) -> None:
    compare(groups, PLAIN["biases, layer norm"], "float32", "int4")


def test_ranks_of_a_stage(tmp_path: Path) -> None:
    run_ranks(check_all, 1, 2, tmp_path)


@pytest.mark.parametrize("name", [*ARCHITECTURES, *MIXED])
def test_layers_with_other_parts_compute_one_by_one(name: str) -> None:
    """Also plain ones whose products are of torch: these are too small for ours."""
    arch = (ARCHITECTURES | MIXED)[name]
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        quantization = None if name in ("llama", "mistral", "qwen3") else "int8"
        stage = make(arch, "float32", quantization, groups)
        for layer in stage.decoder:
            assert isinstance(layer, DecoderLayer)
            assert isinstance(layer.ffn, FeedForward)
            packed = layer.ffn.fc1.packed
            assert (isinstance(packed, CppProduct) and packed.most_rows > 0) == (quantization is not None)
        assert stage.decodes is None


@pytest.mark.usefixtures("one_thread")
def test_chunks_compute_one_by_one() -> None:
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        decodes = make(LLAMA, "float32", "int4", groups).decodes
        assert decodes is not None
        stage = make(LLAMA, "float32", "int4", groups)
        mixed = RaggedBatch.of(list(range(12)), PROMPTS[:1], [Segment(3, 1, [2])], [10, 11])
        inputs = stage.prepare(mixed)
        assert not decodes.takes(12, inputs.contexts)
