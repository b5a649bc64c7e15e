"""The floor counts what a model must compute and read, and no simulated device is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.architecture import Architecture, LayerKind
from gapless.conf.experts import ExpertsConfig
from gapless.conf.latent import LatentConfig
from gapless.kernels.weight_format import WeightFormat
from gapless.models.memory import weight_bytes
from gapless.models.quantization.formats import LayerFormats, ModelFormats
from gapless.parallel.mesh import Mesh
from gapless.parallel.split import split_layers
from gapless.runtime.analysis.explain.rated_costs import floor_seconds
from gapless.runtime.core.micro_batch_sizes import PHASES, Sizes
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, SegmentRecord
from gapless.runtime.core.stage_floor import LastLayer, StageFloor, StageMachine
from gapless.runtime.engine.stage_floors import stage_floors
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape, StageCosts
from tests.runtime.simulation.cost.test_analytic import DEVICES, MODELS, arch_of, costs_of, operators
from tests.runtime.simulation.cost.test_last_layer import shapes
from tests.support.active_params import active_params

MACHINE = StageMachine({"bfloat16": 100.0}, 1000.0)
EXPERTS = replace(
    arch_of("mistral-7b"),
    experts=ExpertsConfig(num_experts=8, experts_per_token=2, shared_ffn_size=512),
    layers=(LayerKind(experts=False), *(LayerKind() for _ in range(31))),
)
LATENT = replace(
    arch_of("llama-13b"),
    num_kv_heads=1,
    head_dim=576,
    latent=LatentConfig(rank=512, head_dim=128, rotary_dim=64, value_dim=128),
)
ARCHITECTURES = {**{name: arch_of(name) for name in MODELS}, "experts": EXPERTS, "latent": LATENT}
LAST: tuple[LastLayer, ...] = ("sampled", "all")


def floors(arch: Architecture, pp: int, last_layer: LastLayer = "sampled", **keys: object) -> list[StageFloor]:
    given = {"tp": 1, "dtype_bytes": 2, "last_layer": last_layer} | keys
    return stage_floors(arch, split_layers(arch, pp, None), [MACHINE] * pp, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("last_layer", LAST)
@pytest.mark.parametrize("pp", [1, 3])
def test_a_row_passes_every_active_parameter_once(name: str, last_layer: LastLayer, pp: int) -> None:
    arch = replace(ARCHITECTURES[name], tie_embeddings=False, position="rope")
    found = floors(arch, pp, last_layer)
    active = (active_params(arch) if arch.experts else arch.num_params) - arch.embedding_params
    assert sum(each.rows.flops + each.sampled.flops for each in found) == pytest.approx(2 * active)
    held = sum(each.rows.bytes + each.sampled.bytes for each in found)
    held += sum(each.rows.expert_bytes + each.sampled.expert_bytes for each in found)
    assert held == pytest.approx(2 * (arch.num_params - arch.embedding_params), rel=1e-6)
    assert all(each.sampled.flops == 0 for each in found[:-1])


def test_quantized_weights_count_the_bytes_that_they_hold() -> None:
    arch, four = arch_of("llama-13b"), WeightFormat(4, 32)
    formats = ModelFormats((LayerFormats(four, four, four, four),) * arch.num_layers, head=WeightFormat(8, 128))
    (found,) = floors(arch, 1, formats=formats)
    whole = weight_bytes(arch, Mesh(1, 1, 0), range(arch.num_layers), 2, formats=formats)
    assert found.rows.bytes + found.sampled.bytes == pytest.approx(whole - 2 * arch.embedding_params)


def test_ranks_of_a_stage_share_the_work() -> None:
    arch, shape = arch_of("llama2-70b"), MicroBatchShape([(256, 512)], 8, 9000, 9)
    alone, shared = (floor_seconds(floors(arch, 2, tp=tp), shape) for tp in (1, 8))
    assert shared == pytest.approx([seconds / 8 for seconds in alone], rel=1e-3)


def test_nothing_is_known_where_a_machine_is_not() -> None:
    arch = arch_of("llama-13b")
    layers = split_layers(arch, 2, None)
    for unknown in (StageMachine(), StageMachine({"float32": 1.0}), StageMachine({}, 1.0)):
        assert stage_floors(arch, layers, [MACHINE, unknown], tp=1, dtype_bytes=2) == []


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), max_size=3),
    st.lists(st.integers(0, 90), max_size=5),
    st.sampled_from([None, 1, 7, 50]),
)
def test_attention_is_counted_pair_by_pair(
    chunks: list[tuple[int, int]], starts: list[int], window: int | None
) -> None:
    record = MicroBatchRecord(
        0,
        0.0,
        [SegmentRecord(9, start, length) for length, start in chunks],
        DecodesRecord.at(range(len(starts)), starts),
    )
    most = window or 10**9
    pairs = sum(min(start + i + 1, most) for length, start in chunks for i in range(length))
    prefixes = sum(min(start, most) for _, start in chunks)
    contexts = sum(min(start + 1, most) for start in starts)
    sizes = Sizes.of_records([record])
    assert [float(each[0]) for each in sizes.attended(window)] == [pairs, prefixes, contexts]
    if chunks or starts:
        assert PHASES[sizes.phase[0]] == ("mixed" if chunks and starts else "prefill" if chunks else "decode")


@given(shapes())
def test_a_record_has_the_floor_of_its_shape(shape: MicroBatchShape) -> None:
    each = shape.context // shape.decodes if shape.decodes else 0
    record = MicroBatchRecord(
        *(0, 0.0, [SegmentRecord(9, start, length) for length, start in shape.chunks]),
        DecodesRecord.at(range(shape.decodes), [each - 1] * shape.decodes),
        sampled_rows=shape.sampled,
    )
    found, sizes = floors(EXPERTS, 2), Sizes.of_records([record] * 3)
    times = [
        max(float(sizes.flops(one)[2]) / one.flops_per_s, float(sizes.bytes(one)[2]) / one.bytes_per_s) for one in found
    ]
    assert floor_seconds(found, shape) == pytest.approx(times)


def test_experts_are_read_as_rows_are_routed_to_them() -> None:
    one, many = (floor_seconds(floors(EXPERTS, 1), MicroBatchShape((), n, n, n))[0] for n in (1, 100))
    layers = EXPERTS.expert_layers
    assert (many - one) * 1e12 == pytest.approx(2 * layers * 6 * EXPERTS.expert_params, rel=0.02)


def test_draft_tokens_read_the_cache_once() -> None:
    record = MicroBatchRecord(0, 0.0, [], DecodesRecord.at([1] * 4, [5000] * 4), sampled_rows=4)
    plain = Sizes.of_records([record])
    record.drafts = 3
    (found,) = floors(arch_of("llama-13b"), 1)
    weights = found.rows.bytes + found.sampled.bytes
    (every,), (once,) = plain.bytes(found) - weights, Sizes.of_records([record]).bytes(found) - weights
    assert once == pytest.approx(every / 4)


@given(shapes(), st.sampled_from(DEVICES), st.sampled_from(MODELS), st.sampled_from((1, 4)))
def test_no_simulated_device_is_faster_than_its_floor(shape: MicroBatchShape, device: str, model: str, tp: int) -> None:
    """Rates are those of large GEMMs: attention reads its keys a little faster on some."""
    arch, gemm = arch_of(model), costs_of(device).gemm
    machine = StageMachine({"bfloat16": gemm.sustained_tflops}, gemm.memory_gigabytes_per_s)
    layers = split_layers(arch, 2, None)
    least = floor_seconds(stage_floors(arch, layers, [machine] * 2, tp=tp, dtype_bytes=2), shape)
    costs = StageCosts([len(each) for each in layers], [operators(device, model, tp=tp)] * 2)
    for seconds, floor in zip(costs.seconds(shape), least, strict=True):
        assert seconds >= 0.8 * floor
