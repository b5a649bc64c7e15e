"""Quantized blocks stay quantized, and compute the tokens of `transformers` by what `gguf` makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from gapless.conf.architecture import Architecture
from gapless.conf.schema import ModelConfig
from gapless.kernels.processor import multiplies_bfloat16
from gapless.kernels.quantized import QuantizedWeight, make_product, make_table
from gapless.kernels.quantized_matrix import QuantizedMatrix
from gapless.kernels.weight_format import WeightFormat
from gapless.models.checkpoint import Checkpoint
from gapless.models.gguf.block_types import BLOCK_TYPES
from gapless.models.gguf.blocks import read_blocks
from gapless.models.quantization.formats import model_formats
from gapless.models.quantization.matrices import converted as in_format
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.models.gguf.test_weights import WIDE, model_of
from tests.models.test_tokens import check, job, prompts_of, reference
from tests.support.forked_ranks import run_ranks
from tests.support.gguf_files import converted, write_gguf
from tests.support.stage_driver import run, run_all
from tests.support.token_reference import quantized_tolerance

FORMATS = {name: each.format for name, each in BLOCK_TYPES.items()}
LARGE = WIDE | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
WRITTEN = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)


def arbitrary(kind: Kind, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Make blocks of arbitrary bits, whose scales are finite."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)
    halves = {Kind.Q2_K: [-1, -3], Kind.Q3_K: [-1], Kind.Q6_K: [-1], Kind.MXFP4: [0]}.get(kind, [1, 3])
    data.reshape(-1, block_bytes)[:, halves] &= 0x3B  # of float16 or E8M0, without the largest exponents
    return data


def weights(kind: Kind, rows: int, columns: int) -> tuple[np.ndarray[Any, Any], Kind]:
    """Make blocks of a type that `gguf` cannot write, whose numbers are as large as weights."""
    at, scale = SCALES[kind]
    data, own = arbitrary(kind, rows, columns), np.array([scale], np.float16 if isinstance(scale, float) else np.uint8)
    for first in at:
        data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])[:, first : first + own.nbytes] = own.view(np.uint8)
    return data, kind


SIZES = {"num_kv_heads": 4, "head_dim": 16, "ffn_size": 64, "max_position": 8}
SCALES = {  # where a block has its scale, and how large
    Kind.Q2_K: ((80, 82), 0.01),
    Kind.Q3_K: ((108,), 0.005),
    Kind.IQ4_NL: ((0,), 0.004),
    Kind.IQ4_XS: ((0,), 0.0002),
    Kind.MXFP4: ((0,), 124),
}


@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_scales_are_the_numbers_that_gguf_makes_of_blocks(name: str, tmp_path: Path) -> None:
    model = model_of(transformers.LlamaConfig(**LARGE))
    down, query = arbitrary(Kind[name], 256, 512), arbitrary(Kind[name], 256, 256)
    blocks = {"blk.0.ffn_down.weight": (down, Kind[name]), "blk.0.attn_q.weight": (query, Kind[name])}
    file = write_gguf(tmp_path / "model.gguf", model, blocks=blocks)
    arch = Checkpoint.open(ModelConfig(weights=str(file))).arch
    source = Checkpoint.open(ModelConfig(weights=str(file))).tensors(arch)
    layer = "model.layers.0."
    assert source.format(f"{layer}mlp.down_proj.weight") == FORMATS[name]
    assert source.format(f"{layer}mlp.up_proj.weight") is None
    whole = torch.from_numpy(gguf.dequantize(down, Kind[name]))
    for columns, group in ((slice(0, 512), 32), (slice(256, 512), 32), (slice(96, 320), 32), (slice(48, 64), 16)):
        found = source.read_quantized(f"{layer}mlp.down_proj.weight", slice(3, 99), columns)
        assert torch.equal(found.dequantized(), whole[3:99, columns])
        assert found.format.group == min(group, FORMATS[name].group)
    rows = slice(70, 200)  # of queries, in the order of halves
    found = source.read_quantized(f"{layer}self_attn.q_proj.weight", rows, slice(0, 256))
    assert torch.equal(found.dequantized(), source.read(f"{layer}self_attn.q_proj.weight", rows, slice(0, 256)))


@pytest.mark.parametrize("kind", [Kind.IQ4_NL, Kind.IQ4_XS])
def test_a_matrix_of_a_codebook_has_a_product_or_is_held_as_integers(kind: Kind) -> None:
    data, _ = weights(kind, 64, 512)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    matrix = read_blocks(BLOCK_TYPES[kind.name], data.reshape(64, -1, block_bytes), block, slice(0, 512))
    numbers = torch.from_numpy(gguf.dequantize(data, kind))
    assert torch.equal(in_format(matrix, WeightFormat(8, 32)).dequantized(), numbers)
    x = torch.randn(3, 512)
    error = 1e-4 if multiplies_bfloat16() else 5e-4 * float(numbers.norm(dim=1).max())
    torch.testing.assert_close(make_product(matrix, torch.float32).linear(x), x @ numbers.T, rtol=1e-4, atol=error)
    arch = Architecture(vocab_size=8, hidden_size=64, num_layers=1, num_heads=4, **SIZES)
    for device in ("cpu", "cuda"):
        found = model_formats(lambda name: matrix.format, arch, 1, device)
        is_kept = device == "cpu" and not multiplies_bfloat16()
        assert found.layers[0].fc1 == found.head == (matrix.format if is_kept else WeightFormat(8, 32))


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_blocks_compute_as_their_numbers_do(tp: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model, jobs = model_of(transformers.LlamaConfig(**LARGE)), []
    matrices = {name: array.shape for name, array in converted(model).items() if array.ndim > 1}
    for kind in SCALES:
        blocks = {name: weights(kind, *shape) for name, shape in matrices.items()}
        numbers = {name: gguf.dequantize(*block) for name, block in blocks.items()}
        for name, over in ((kind.name, {"blocks": blocks}), (f"{kind.name}-numbers", {"more": numbers})):
            file = write_gguf(tmp_path / f"{name}.gguf", model, **over)
            jobs.append(job(tmp_path / f"{name}.npz", weights=str(file)))
    run_ranks(run_all, 1, tp, tmp_path, jobs)
    for kind in SCALES:
        expected = np.load(tmp_path / f"{kind.name}-numbers.npz")
        tolerance = quantized_tolerance(FORMATS[kind.name].half_scales)
        check(tmp_path / f"{kind.name}.npz", expected["tokens"], expected["logits"], tolerance)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray, np.ndarray]]:
    """Write a file of each kind, and one of several, with the reference's tokens and logits."""
    torch.set_num_threads(1)
    made = {}
    for kind in (*WRITTEN, None):
        model = model_of(transformers.LlamaConfig(**WIDE))
        kinds = {name: kind or Kind.Q4_1 for name, array in converted(model).items() if array.ndim > 1}
        if kind is None:
            kinds |= {
                "blk.0.attn_v.weight": Kind.Q8_0,
                "blk.0.ffn_gate.weight": Kind.Q5_0,
                "token_embd.weight": Kind.Q8_0,
            }
            kinds |= {"blk.1.ffn_up.weight": Kind.F16}
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        arrays = converted(model)
        blocks = {name: (gguf.quantize(arrays[name], of), of) for name, of in kinds.items()}
        file = write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", model, blocks=blocks)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    of = kinds[names.get_name(key, try_suffixes=(".weight",))]
                    parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), of), of)))
        made["several" if kind is None else kind.name] = (file, *reference(model, prompts_of(101)))
    return made


def test_a_matrix_of_several_kinds_takes_what_holds_all(files: dict[str, Any]) -> None:
    file = files["several"][0]
    arch = Checkpoint.open(ModelConfig(weights=str(file))).arch
    formats = model_formats(Checkpoint.open(ModelConfig(weights=str(file))).tensors(arch).format, arch, 1, "cpu")
    first, second = formats.layers
    assert (first.qkv, second.qkv) == (FORMATS["Q5_1"], FORMATS["Q4_1"])  # 8 bits with offsets, 4 bits with offsets
    assert (first.fc1, second.fc1) == (FORMATS["Q5_1"], None)
    assert (formats.embedding, formats.head) == (FORMATS["Q8_0"], FORMATS["Q4_1"])


@pytest.mark.parametrize("kind", [*(kind.name for kind in WRITTEN), "several"])
def test_one_rank(kind: str, files: dict[str, Any], tmp_path: Path) -> None:
    file, tokens, logits = files[kind]
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        run(groups, job(tmp_path / "out.npz", weights=str(file)))
    check(tmp_path / "out.npz", tokens, logits, quantized_tolerance())


@pytest.mark.parametrize(("pp", "tp"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)])
def test_meshes(pp: int, tp: int, files: dict[str, Any], tmp_path: Path) -> None:
    over = {"replicate_embedding": tp == pp == 2}
    jobs = [job(tmp_path / f"{name}.npz", weights=str(file), **over) for name, (file, *_) in files.items()]
    run_ranks(run_all, pp, tp, tmp_path, jobs)
    for name, (_, tokens, logits) in files.items():
        check(tmp_path / f"{name}.npz", tokens, logits, quantized_tolerance())


def test_scales_of_k_types_take_two_bytes_where_products_round_more() -> None:
    """In float32 on a level without bfloat16: rows move by 2^-12 then, and elsewhere not at all."""
    data, _ = weights(Kind.Q2_K, 64, 512)
    block, block_bytes = gguf.GGML_QUANT_SIZES[Kind.Q2_K]
    matrix = read_blocks(BLOCK_TYPES["Q2_K"], data.reshape(64, -1, block_bytes), block, slice(0, 512))
    numbers = torch.from_numpy(gguf.dequantize(data, Kind.Q2_K))
    assert matrix.dequantized().equal(numbers)
    for half_scales in (True, False):
        own = QuantizedMatrix(
            replace(matrix.format, half_scales=half_scales), matrix.codes, matrix.scales, matrix.offsets
        )
        product = make_table(own, torch.float32)
        if not isinstance(product, QuantizedWeight):
            pytest.skip("needs a C++ compiler")
        rounds = half_scales and not multiplies_bfloat16()
        assert product._scales.itemsize == (2 if rounds else 4)
        error = (product.rows(torch.arange(64)) - numbers).abs().max()
        assert (0 < error < 2**-10 * numbers.abs().max()) if rounds else error == 0
