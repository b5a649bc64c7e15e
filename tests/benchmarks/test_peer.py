"""What `benchmarks/peer.py` makes of files and of seconds."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers

from benchmarks.peer import ALONE, equal_share, prefills, token_rates
from benchmarks.support.llama_build import cmake_arguments
from benchmarks.support.requantize import requantize
from gapless.kernels.processor import LEVELS
from tests.support.gguf_files import write_gguf
from tests.support.hf_models import LLAMA

Kind = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.BF16])
def test_a_file_of_another_type_has_the_same_fields_and_vectors(kind: Kind, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**LLAMA, "intermediate_size": 96})  # whole blocks of 32
    model = transformers.AutoModelForCausalLM.from_config(config)
    source = write_gguf(tmp_path / "source.gguf", model, Kind.F32)
    before, after = (gguf.GGUFReader(path) for path in (source, requantize(source, kind, tmp_path / "other.gguf")))
    for name, field in before.fields.items():
        if not name.startswith("GGUF.") and name != "general.file_type":
            assert after.fields[name].contents() == field.contents()
    for own, other in zip(before.tensors, after.tensors, strict=True):
        assert (own.name, own.shape.tolist()) == (other.name, other.shape.tolist())
        assert other.tensor_type == (kind if len(own.shape) == 2 else Kind.F32)
        found = gguf.quants.dequantize(other.data, other.tensor_type)
        assert np.abs(found - own.data).max() <= 0.01 * np.abs(own.data).max()


def test_decodes_are_the_whole_time_less_that_of_the_prompts() -> None:
    requests = [{"prompt": [7] * 10, "output": 5}] * ALONE
    alone = [[request] for request in requests]
    rounds = [prefills(requests), requests, *map(prefills, alone), *alone]
    rates = token_rates(rounds, [2.0, 10.0, *[0.5] * ALONE, *[1.5] * ALONE])
    assert rates == {"prompts": 10 * ALONE / 2, "decodes": 4 * ALONE / 8, "lone_prompt": 20, "lone_decodes": 4}


def test_equal_requests_are_counted() -> None:
    assert equal_share([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.5


def test_llama_cpp_is_built_for_a_level() -> None:
    v3, amx = (next(level for level in LEVELS if level.name == name) for name in ("x86-64-v3", "amx"))
    assert cmake_arguments(None) == "-DGGML_NATIVE=ON"
    assert set(cmake_arguments(v3).split()) == {
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "BMI2", "F16C", "FMA")),
    }
    assert "-DGGML_AMX_INT8=ON" in cmake_arguments(amx)
    dotprod = next(level for level in LEVELS if level.name == "armv8-dotprod")
    assert cmake_arguments(dotprod) == "-DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod"
