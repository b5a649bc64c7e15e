"""Triton's kernels give what torch's operators give, in Triton's interpreter, and compile for an H100 without a GPU.

They need the package `triton`, which builds of torch for CUDA bring along.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch

from gapless.kernels.head_norm import HeadNorm
from gapless.kernels.operators.base import TorchKernels

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.slow,
]
CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}  # the interpreter's bfloat16 rounds down


def test_kernels_compute_what_torchs_operators_do() -> None:
    """In a process of its own: Triton must know that it interprets when it is imported."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "all are equal\n"), done.stderr


def check_in_interpreter() -> None:
    from gapless.kernels.operators.triton import TritonKernels

    kernels = TritonKernels(CPU)
    torch.manual_seed(0)
    for dtype in TOLERANCES:
        for T, H in ((1, 8), (3, 37), (5, 1100)):
            check_norms_and_gate(kernels, T, H, dtype)
        for sizes in ((1, 1, 1, 2), (5, 2, 3, 12), (4, 2, 8, 64), (2, 1, 71, 80)):
            for rotated, normed in product((True, False), repeat=2):
                check_rotation_and_writes(kernels, *sizes, rotated, normed, dtype)
    print("all are equal")


def close(found: Any, expected: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def check_norms_and_gate(kernels: Any, T: int, H: int, dtype: torch.dtype) -> None:
    x, added, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((T, H), (T, H), (H,), (H,)))
    for to_add, of_norm in product((None, added), (None, bias)):
        found, expected = x.clone(), x.clone()
        normed = kernels.norm(found, to_add, weight, of_norm, 1e-5)
        close(normed, TorchKernels().norm(expected, to_add, weight, of_norm, 1e-5), dtype)
        close(found, expected, dtype)
    hidden = torch.randn(T, 2 * H).to(dtype) * 5
    close(kernels.gated_silu(hidden), TorchKernels().gated_silu(hidden.clone()), dtype)


def check_rotation_and_writes(
    kernels: Any, T: int, K: int, G: int, D: int, rotated: bool, normed: bool, dtype: torch.dtype
) -> None:
    head_norm = HeadNorm(D, 1e-5, dtype=dtype, device=CPU).requires_grad_(False) if normed else None
    for weight in head_norm.parameters() if head_norm is not None else ():
        weight.normal_()
    qkv, angles = torch.randn(T, K, G + 2, D).to(dtype), torch.randn(T, 1, 1, D // 2)
    rope = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotated else None
    slots = torch.randperm(T + 3)[:T]
    found, expected = [[torch.zeros(T + 3, K, D, dtype=dtype) for _ in range(2)] for _ in range(2)]
    out = torch.empty(T, K, G, D, dtype=dtype)
    queries = kernels.rotate_and_write(qkv, head_norm, rope, slots, *found, out)
    assert queries is out
    close(queries, TorchKernels().rotate_and_write(qkv, head_norm, rope, slots, *expected), dtype)
    close(found, expected, dtype)


def test_kernels_compile_for_an_h100() -> None:
    """Of LLaMA 2 70B over 8 ranks, and of GPT-3."""
    from gapless.kernels.operators import triton as kernels

    sizes = {"G": 8, "D": 128, "HEADS": 16, "BLOCK": 128}
    compile_for_h100(kernels, "_add_and_norm", 16, bias=None, SIZE=8192, BLOCK=8192)
    compile_for_h100(kernels, "_add_and_norm", 16, added=None, SIZE=12288, BLOCK=16384)
    compile_for_h100(kernels, "_gated_silu", 4, SIZE=3584, BLOCK=1024)
    compile_for_h100(kernels, "_rotate_and_write", 4, **sizes)
    compile_for_h100(kernels, "_rotate_and_write", 4, **sizes, query_weight=None, key_weight=None)
    compile_for_h100(kernels, "_rotate_and_write", 4, **sizes, query_weight=None, key_weight=None, cos=None, sin=None)


def compile_for_h100(kernels: ModuleType, name: str, num_warps: int, **constants: Any) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(kernels, name)
    names = [parameter.name for parameter in kernel.params]
    types = {"slots": "*i64", "eps": "fp32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        {own: types.get(own, "*bf16") for own in names},
        {(names.index(own),): value for own, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    assert len(compiled.asm["cubin"])
    assert ".local" not in compiled.asm["ptx"], "registers suffice"


if __name__ == "__main__":
    check_in_interpreter()
