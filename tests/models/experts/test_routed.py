"""The products of experts: those of transformers' blocks, in C++ and by torch, whole and shared among ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from gapless.conf.experts import ExpertsConfig
from gapless.kernels.experts import SeparateExperts
from gapless.kernels.processor import multiplies_bfloat16
from gapless.kernels.quantized_matrix import QuantizedMatrix
from gapless.kernels.weight_format import SHORT, WeightFormat
from gapless.models.experts import routed
from gapless.models.experts.routed import RoutedExperts
from gapless.models.experts.router import route
from gapless.models.quantization.matrices import round_to
from gapless.parallel.mesh import Mesh

CPU = torch.device("cpu")
CLAMPED = {"clamp": 7.0, "sigmoid_factor": 1.702, "bias": True}


def _experts(
    H: int, F: int, config: ExpertsConfig, *, mesh: Mesh | None = None, whole: bool = False, dtype: Any = torch.float32
) -> RoutedExperts:
    made = RoutedExperts(H, F, config, mesh=mesh or Mesh(1, 1, 0), whole=whole, dtype=dtype, device=CPU)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


@pytest.mark.parametrize("packed", [False, True], ids=["torch", "cpp"])
def test_experts_are_mixtrals(packed: bool) -> None:
    torch.manual_seed(1)
    theirs = MixtralExperts(transformers.MixtralConfig(hidden_size=48, intermediate_size=40, num_local_experts=6))
    config = ExpertsConfig(num_experts=6, experts_per_token=2)
    own = _experts(48, 40, config)
    theirs.gate_up_proj.data, theirs.down_proj.data = own.gate_up.data, own.down.data
    x, residual = torch.randn(31, 48), torch.randn(31, 48)
    picked, weights = route(torch.randn(31, 6), config)
    with torch.inference_mode():
        expected = residual + theirs(x, picked, weights)
        if packed:
            own.pack()
            assert own.packed is not None
        torch.testing.assert_close(own(x, picked, weights, residual), expected)


@pytest.mark.parametrize("packed", [False, True], ids=["torch", "cpp"])
def test_experts_are_those_of_gpt_oss(packed: bool) -> None:
    torch.manual_seed(2)
    theirs = GptOssExperts(transformers.GptOssConfig(hidden_size=48, intermediate_size=40, num_local_experts=6))
    config = ExpertsConfig(num_experts=6, experts_per_token=3, **CLAMPED)
    own = _experts(48, 40, config)
    gate, up = own.gate_up.data.chunk(2, dim=1)
    theirs.gate_up_proj.data = torch.stack((gate, up), dim=2).flatten(1, 2).transpose(1, 2).contiguous()
    assert own.gate_up_bias is not None
    assert own.down_bias is not None
    theirs.gate_up_proj_bias.data = torch.stack(own.gate_up_bias.data.chunk(2, dim=1), dim=2).flatten(1)
    theirs.down_proj.data, theirs.down_proj_bias.data = own.down.data.transpose(1, 2).contiguous(), own.down_bias.data
    x = 4 * torch.randn(31, 48)  # beyond the clamp
    picked, weights = route(torch.randn(31, 6), config)
    with torch.inference_mode():
        expected = theirs(x, picked, weights)
        if packed:
            own.pack()
        torch.testing.assert_close(own(x, picked, weights), expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.one_of(st.integers(0, 5), st.integers(30, 240)),
    hidden=st.integers(1, 90),
    width=st.integers(1, 70),
    count=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rule=st.sampled_from([{}, CLAMPED]),
    data=st.data(),
)
def test_cpp_products_are_torchs_at_any_size(
    tokens: int, hidden: int, width: int, count: int, dtype: torch.dtype, rule: dict[str, Any], data: st.DataObject
) -> None:
    config = ExpertsConfig(num_experts=count, experts_per_token=data.draw(st.integers(1, count)), **rule)
    torch.manual_seed(0)
    own = _experts(hidden, width, config, dtype=dtype)
    x, residual = torch.randn(tokens, hidden, dtype=dtype), torch.randn(tokens, hidden, dtype=dtype)
    picked, weights = route(torch.randn(tokens, count), config)
    with torch.inference_mode():
        exact = copy.deepcopy(own).float()(x.float(), picked, weights, residual.float())
        theirs = own(x, picked, weights, residual).float() - exact
        own.pack()
        assert own.packed is not None
        found = own(x, picked, weights, residual).float()
    if dtype == torch.float32:
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
    else:
        assert (found - exact).norm() <= 1.1 * theirs.norm(), "no further off than torch's products"


@pytest.mark.parametrize("packed", [False, True], ids=["torch", "cpp"])
@pytest.mark.parametrize("whole", [False, True], ids=["slices", "whole"])
def test_ranks_add_up_to_one_that_holds_all(whole: bool, packed: bool) -> None:
    torch.manual_seed(3)
    config = ExpertsConfig(num_experts=6, experts_per_token=3, **CLAMPED)
    full = _experts(32, 36, config)
    assert full.gate_up_bias is not None
    assert full.down_bias is not None
    x = torch.randn(40, 32)
    picked, weights = route(torch.randn(40, 6), config)
    total = torch.zeros(40, 32)
    for rank in range(2):
        own = _experts(32, 36, config, mesh=Mesh(1, 2, rank), whole=whole)
        assert own.gate_up_bias is not None
        assert own.down_bias is not None
        share = slice(3 * rank, 3 * rank + 3) if whole else slice(18 * rank, 18 * rank + 18)
        experts, columns = (share, slice(None)) if whole else (slice(None), share)
        own.gate_up.data = full.gate_up.data[experts].unflatten(1, (2, 36))[:, :, columns].flatten(1, 2)
        own.gate_up_bias.data = full.gate_up_bias.data[experts].unflatten(1, (2, 36))[:, :, columns].flatten(1)
        own.down.data = full.down.data[experts, :, columns].contiguous()
        own.down_bias.data = full.down_bias.data[experts]
        if packed:
            own.pack()
        total += own(x, picked, weights).detach()
    torch.testing.assert_close(total, full(x, picked, weights).detach(), atol=1e-4, rtol=1e-4)


def test_the_grouped_product_of_cuda_is_the_loop_over_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has the operator on a CPU too; here it stands in for the loop, with the arguments that CUDA gives it."""
    torch.manual_seed(4)
    config = ExpertsConfig(num_experts=5, experts_per_token=2)
    own = _experts(32, 16, config, dtype=torch.bfloat16)
    x = torch.randn(20, 32, dtype=torch.bfloat16)
    picked, weights = route(torch.randn(20, 5), config)
    expected = own(x, picked, weights)
    calls = []

    def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, out_size: int) -> torch.Tensor:
        calls.append(weight.shape)
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)

    monkeypatch.setattr(routed, "_grouped_product", grouped)
    torch.testing.assert_close(own(x, picked, weights), expected)
    assert len(calls) == 2


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.one_of(st.integers(1, 5), st.integers(30, 300)),
    sizes=st.tuples(*[st.sampled_from([32, 64, 96])] * 2),
    count=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    format=st.sampled_from(
        [(4, 32, True, False), (4, 16, False, False), (8, 32, True, False), (8, 0, False, True), *SHORT.values()]
    ),
    rule=st.sampled_from([{}, CLAMPED]),
    in_cpp=st.booleans(),
    data=st.data(),
)
def test_quantized_experts_are_their_numbers(
    tokens: int,
    sizes: tuple[int, int],
    count: int,
    dtype: torch.dtype,
    format: tuple[int, int, bool, bool] | WeightFormat,
    rule: dict[str, Any],
    in_cpp: bool,
    data: st.DataObject,
) -> None:
    """All experts in one call of C++, and one after the other; where activations are rounded, nearly so.

    Those of 16 bits are widened where the processor does not multiply bfloat16.
    """
    torch.set_num_threads(1)
    hidden, width = sizes
    config = ExpertsConfig(num_experts=count, experts_per_token=data.draw(st.integers(1, count)), **rule)
    torch.manual_seed(0)
    plain = _experts(hidden, width, config)
    if isinstance(format, WeightFormat):
        formats, rounds = (format, format), False
    else:
        bits, group, has_offsets, rounds = format
        formats = tuple(WeightFormat(bits, group or size, has_offsets, rounds) for size in sizes)
    own = RoutedExperts(
        hidden, width, config, mesh=Mesh(1, 1, 0), whole=False, dtype=dtype, device=CPU, formats=formats
    )
    for i in range(count):
        for matrix, numbers in zip(own.weights(i), plain.weights(i), strict=True):
            if isinstance(matrix, torch.Tensor):
                numbers.data.copy_(matrix.copy_(numbers))
                continue
            found = round_to(numbers.detach(), matrix.format)
            numbers.data.copy_(found.dequantized())
            for name in ("codes", "scales", "offsets") if has_offsets else ("codes", "scales"):
                getattr(matrix, name).copy_(getattr(found, name))
    for name in ("gate_up_bias", "down_bias") if rule else ():
        getattr(own, name).data.copy_(getattr(plain, name))
    x, residual = torch.randn(tokens, hidden, dtype=dtype), torch.randn(tokens, hidden, dtype=dtype)
    picked, weights = route(torch.randn(tokens, count), config)
    with torch.inference_mode():
        expected = plain(x.float(), picked, weights, residual.float())
        own.pack()
        if formats[0].bits < 16 or not multiplies_bfloat16():
            assert isinstance(own.packed, SeparateExperts)
        if not in_cpp:
            own.packed = None
        tolerance = (1e-4 if dtype == torch.float32 else 2e-2) + (0.05 if rounds else 0)
        found = own(x, picked, weights, residual).float()
    assert ((found - expected).abs().max() <= tolerance * expected.abs().max()).item()


def test_experts_whose_gemm_limits_rows_run_one_by_one() -> None:
    """OneDNN packs dequantized FP8 weights, and our GEMM on its layout takes few rows."""
    torch.set_num_threads(1)
    config = ExpertsConfig(num_experts=2, experts_per_token=1)
    torch.manual_seed(0)
    plain = _experts(256, 256, config)
    fp8 = WeightFormat(8, 256, is_float=True)
    own = RoutedExperts(
        256, 256, config, mesh=Mesh(1, 1, 0), whole=False, dtype=torch.float32, device=CPU, formats=(fp8, fp8)
    )
    for i in range(2):
        for matrix, values in zip(own.weights(i), plain.weights(i), strict=True):
            assert isinstance(matrix, QuantizedMatrix)
            found = round_to(values.detach(), fp8)
            values.data.copy_(found.dequantized())
            matrix.codes.copy_(found.codes)
            matrix.scales.copy_(found.scales)
    x = torch.randn(300, 256)
    picked, weights = route(torch.randn(300, 2), config)
    with torch.inference_mode():
        own.pack()
        assert own.packed is None
        torch.testing.assert_close(own(x, picked, weights), plain(x, picked, weights), rtol=1e-4, atol=1e-4)
