"""SmolLM2-135M-Instruct computes what `transformers` does by its dequantized weights, in one process and over ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from gapless import LLM, Conversation, SamplingParams
from gapless.conf.errors import ConfigError
from gapless.models.gguf.smollm2 import smollm2
from gapless.models.tokenizer import load_tokenizer
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.models.test_tokens import NEW, check, job, reference
from tests.support.gguf_files import PAGE
from tests.support.process_launcher import ProcessLauncher
from tests.support.stage_driver import run
from tests.support.token_reference import quantized_tolerance

try:
    FILE = smollm2()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

HEADS, KV_HEADS = 9, 3


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    """Make the model of `transformers`, from what the package `gguf` reads and dequantizes."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(FILE).tensors}
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            array = gguf.dequantize(found[name].data, found[name].tensor_type)
            if ".q_proj." in key or ".k_proj." in key:
                heads = HEADS if ".q_proj." in key else KV_HEADS
                pairs = array.reshape(heads, -1, 2, array.shape[-1])
                array = pairs.swapaxes(1, 2).reshape(array.shape)
            parameter.copy_(torch.from_numpy(np.array(array)).reshape(parameter.shape))
    return made


@pytest.mark.slow
def test_tokens(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    encode = load_tokenizer(FILE, 49152).encode
    prompts = [encode(text) for text in ("The capital of France is", "def fibonacci(n):\n", "Привет, как дела?")]
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        run(groups, job(tmp_path / "out.npz", weights="smollm2", prompts=prompts, chunks=[5, 3]))
    check(tmp_path / "out.npz", *reference(model, prompts), quantized_tolerance())


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp"), [(1, 3), (2, 1), (3, 1)])
def test_tokens_over_ranks(pp: int, tp: int, model: transformers.PreTrainedModel) -> None:
    encode = load_tokenizer(FILE, 49152).encode
    prompts = [encode(text) for text in ("The capital of France is", "def fibonacci(n):\n")]
    over: dict[str, Any] = {"parallel.threads": 1, "scheduler.chunk": 4, "cache.num_blocks": 64}
    over["model.dtype"] = "float32"
    with LLM("smollm2", pp=pp, tp=tp, launcher=ProcessLauncher(), **over) as llm:
        answers = llm.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert [each.outputs[0].token_ids for each in answers] == reference(model, prompts)[0].tolist()


@pytest.mark.slow
def test_the_perplexity_of_a_page_and_an_answer(model: transformers.PreTrainedModel) -> None:
    params = SamplingParams(max_tokens=24, prompt_logprobs=0)
    with LLM("smollm2", **{"parallel.threads": 2, "model.dtype": "float32"}) as llm:
        (page,) = llm.generate(PAGE, params)
        (answer,) = llm.generate(Conversation([{"role": "user", "content": "What is the capital of France?"}]))
    ids = page.prompt_token_ids
    assert page.prompt_logprobs is not None
    ours = sum(row[token].logprob for row, token in zip(page.prompt_logprobs[1:], ids[1:], strict=True) if row)
    with torch.inference_mode():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    theirs = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
    perplexity, expected = (math.exp(-each / (len(ids) - 1)) for each in (ours, theirs))
    assert perplexity == pytest.approx(expected, rel=1e-4)
    assert "Paris" in answer.outputs[0].text
