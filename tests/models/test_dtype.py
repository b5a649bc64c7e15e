"""`model.dtype=auto`: the type that a checkpoint and this machine's processor come to, and what is said of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import gguf
import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.conf.build import compose_engine
from gapless.conf.schema import Architecture, ModelConfig
from gapless.kernels import processor
from gapless.models.checkpoint import Checkpoint
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.pipeline.start_warnings import warn_of_slow_ranks
from tests.support.gguf_files import write_gguf
from tests.support.hf_models import greedy, make_model
from tests.support.process_launcher import ProcessLauncher

FAST = processor.multiplies_bfloat16()
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a checkpoint of bfloat16."""
    make_model("llama", tmp_path).bfloat16().save_pretrained(tmp_path)
    return tmp_path


def state(folder: Path, **keys: object) -> ModelConfig:
    """Change what a folder's config says, None for nothing, and return its model."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return ModelConfig(weights=str(folder))


@pytest.mark.parametrize(
    ("stated", "is_short"),
    [("bfloat16", True), ("float16", True), ("torch.bfloat16", True), ("float32", False), (None, False)],
)
def test_a_folders_type(folder: Path, stated: str | None, is_short: bool) -> None:
    assert Checkpoint.open(state(folder, dtype=stated)).is_short == is_short
    assert Checkpoint.open(state(folder, dtype=None, torch_dtype=stated)).is_short == is_short


@pytest.mark.parametrize(("kind", "is_short"), [("F32", False), ("F16", True), ("BF16", True)])
def test_a_files_type(kind: str, is_short: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_model("llama", tmp_path), gguf.GGMLQuantizationType[kind])
    assert Checkpoint.open(ModelConfig(weights=str(path))).is_short == is_short


def test_auto_is_what_the_processor_multiplies(folder: Path) -> None:
    short = ModelConfig(weights=str(folder))
    assert Checkpoint.open(short).dtype("cpu") == ("bfloat16" if FAST else "float32")
    assert Checkpoint.open(short).dtype("cuda:0") == "bfloat16"
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 16, "max_position": 32}
    arch = Architecture(vocab_size=16, hidden_size=16, num_layers=1, **sizes)
    assert Checkpoint.open(ModelConfig(architecture=arch)).dtype("cpu") == "float32"
    assert Checkpoint.open(ModelConfig(architecture=arch, dtype="float32")).dtype("cuda") == "float32"


def test_the_line_that_says_float32(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plans = [
        make_plan(compose_engine(model=str(folder), overrides={"model.tokenizer": "none"} | each))
        for each in ({}, {"model.dtype": "float32"})
    ]
    assert plans[1].dtype == "float32"
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("model.dtype=auto")]
    assert len(lines) == (0 if FAST else 1)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_every_rank_computes_in_the_type_of_the_plan(folder: Path, pp: int, tp: int) -> None:
    launcher = ProcessLauncher() if pp * tp > 1 else "local"
    outputs = []
    for dtype in ("auto", "bfloat16" if FAST else "float32"):
        with LLM(
            str(folder),
            pp=pp,
            tp=tp,
            launcher=launcher,
            **{"parallel.threads": 1, "model.dtype": dtype, "model.tokenizer": "none"},
        ) as llm:
            (found,) = llm.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True))
        outputs.append(found.outputs[0].token_ids)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_experts_of_16_bits_in_float32(name: str, tmp_path: Path) -> None:
    """They are widened as they are multiplied, where that is sooner: tokens are those of float32."""
    model = make_model(name, tmp_path).bfloat16()
    model.save_pretrained(tmp_path)
    expected = greedy(model.float(), PROMPT, 8)
    keys = {"parallel.threads": 1, "model.dtype": "float32", "model.tokenizer": "none"}
    with LLM(str(tmp_path), launcher="local", **keys) as llm:
        (found,) = llm.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True))
    assert list(found.outputs[0].token_ids) == expected


def test_slow_ranks_are_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_slow_ranks((False, True, False))
    assert caplog.messages == [
        "bfloat16 is slow on rank 1: the processor has neither AVX-512 BF16 nor AMX; model.dtype=float32 is faster"
    ]


def test_the_processors_flags() -> None:
    assert (torch.backends.cpu.get_cpu_capability() == "AVX512") == ("avx512f" in processor.flags())
