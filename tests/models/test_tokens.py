"""Greedy outputs are those of `transformers` in fp32, for every family, in chunks, mixed batches, scattered blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gapless.conf.schema import ModelConfig
from gapless.models.checkpoint import Checkpoint
from gapless.models.layout import tensor_shapes
from gapless.models.safetensors_folder import SafetensorsFolder
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support import expert_models, hf_models
from tests.support.forked_ranks import run_ranks
from tests.support.stage_driver import run, run_all
from tests.support.token_reference import NEW, Folders, check, job, prompts_of, reference

COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, transformers.PretrainedConfig] = {
    "gpt2": transformers.GPT2Config(
        vocab_size=101, n_embd=32, n_layer=3, n_head=4, n_positions=128, initializer_range=0.25, eos_token_id=None
    ),
    "llama": transformers.LlamaConfig(**COMMON),
    "llama-gqa": transformers.LlamaConfig(**COMMON | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-biased": transformers.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, head_dim=12),
    "llama-linear": transformers.LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
    ),
    "llama-llama3": transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "mistral-window": transformers.MistralConfig(**COMMON | {"num_key_value_heads": 2}, sliding_window=9),
    "qwen2": transformers.Qwen2Config(**COMMON | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-window": transformers.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=6, max_window_layers=0),
    "qwen3": transformers.Qwen3Config(**COMMON | {"num_key_value_heads": 2}, head_dim=16),
} | {
    name: make() for name, make in hf_models.CONFIGS.items() if name not in {*hf_models.PLAIN, *expert_models.FAMILIES}
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(FAMILIES, tmp_path_factory)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_holds_the_tensors_of_its_architecture(name: str, folders: Folders) -> None:
    folder = folders[name][0]
    arch = Checkpoint.open(ModelConfig(weights=str(folder))).arch
    SafetensorsFolder(folder).check(arch, tensor_shapes(arch))


CHUNKS = [([64], False), ([7], True), ([5, 3], False), ([1, 10, 2], True)]
WITH_TRAITS = [name for name in FAMILIES if name in hf_models.CONFIGS and name not in hf_models.PLAIN]


def cases() -> Iterator[Any]:
    """Yield each way to cut prompts for each family; of those with traits the first tier has one each, by turns."""
    for number, name in enumerate(FAMILIES):
        for place, (chunks, scattered) in enumerate(CHUNKS):
            is_left_out = name in WITH_TRAITS and number % len(CHUNKS) != place
            marks = pytest.mark.slow if is_left_out else ()
            yield pytest.param(name, chunks, scattered, id=f"{name}-{'-'.join(map(str, chunks))}", marks=marks)


@pytest.mark.parametrize(("name", "chunks", "scattered"), list(cases()))
def test_one_rank(name: str, chunks: list[int], scattered: bool, folders: Folders, tmp_path: Path) -> None:
    folder, tokens, logits = folders[name]
    plain = chunks == [7]  # torch's operators, as without a compiler
    each = job(
        tmp_path / "out.npz",
        weights=str(folder),
        chunks=chunks,
        scattered=scattered,
        plain=plain,
        pieces=chunks == [5, 3],
    )
    torch.set_num_threads(1)
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        run(groups, each)
    check(tmp_path / "out.npz", tokens, logits)


WIDE = COMMON | {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32}  # few rows have our product
IN_BFLOAT16: dict[str, transformers.PretrainedConfig] = {
    "gpt2": FAMILIES["gpt2"],
    "llama-gqa": transformers.LlamaConfig(**WIDE | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": transformers.Qwen3Config(**WIDE),
    **{name: FAMILIES[name] for name in ("gemma2", "gemma3", "olmo2", "granite", "glm4", "falcon")},
}


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_bfloat16(name: str, tmp_path: Path) -> None:
    """Tokens are those of `transformers` but for ties, and logits are as near to those of float32 as its are."""
    torch.manual_seed(11)
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(IN_BFLOAT16[name])).to(torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    tokens, logits = reference(model, prompts_of(101))
    each = job(tmp_path / "out.npz", weights=str(tmp_path), dtype="bfloat16", chunks=[5, 3], scattered=True)
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        run(groups, each)
    got = np.load(tmp_path / "out.npz")
    model.float()
    errors: list[list[np.ndarray]] = [[], []]
    for prompt, own, own_logits, wanted, wanted_logits in zip(
        prompts_of(101), got["tokens"], got["logits"], tokens, logits, strict=True
    ):
        same = next((i for i in range(NEW) if own[i] != wanted[i]), NEW - 1)
        with torch.inference_mode():
            text = torch.tensor([prompt + wanted[:same].tolist()])
            exact = model(text).logits[0, len(prompt) - 1 :].numpy()
        for found, error in zip((own_logits, wanted_logits), errors, strict=True):
            error.append(found[: same + 1] - exact)
        assert exact[same, wanted[same]] - exact[same, own[same]] <= 2 * np.abs(errors[1][-1][same]).max()
    own_error, wanted_error = (np.square(np.concatenate(error)).mean() ** 0.5 for error in errors)
    assert own_error <= 1.1 * wanted_error


RANDOM = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 48,
    "max_position": 128,
}


GRIDS = [
    (2, 2, {"layers": [1, 2], "scattered": True, "replicate_embedding": True}),
    pytest.param(2, 2, {"layers": [2, 1], "scattered": True, "pieces": True}, marks=pytest.mark.slow),
    pytest.param(2, 1, {"layers": [2, 1], "pieces": True}, marks=pytest.mark.slow),
    (1, 2, {"chunks": [5, 3]}),
]


GROUPS = [
    pytest.param([name for name in FAMILIES if name not in WITH_TRAITS], id="plain"),
    pytest.param(WITH_TRAITS, id="with traits", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("names", GROUPS)
@pytest.mark.parametrize(("pp", "tp", "over"), GRIDS)
def test_meshes(pp: int, tp: int, over: dict[str, Any], names: list[str], folders: Folders, tmp_path: Path) -> None:
    """Each family over gloo processes, at once and by pieces, and random weights, which are the same on every mesh."""
    jobs = [job(tmp_path / f"{name}.npz", weights=str(folders[name][0]), **over) for name in names]
    run_ranks(run_all, pp, tp, tmp_path, [*jobs, job(tmp_path / "random.npz", architecture=RANDOM)])
    for name in names:
        _, tokens, logits = folders[name]
        check(tmp_path / f"{name}.npz", tokens, logits)
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        run(groups, job(tmp_path / "alone.npz", architecture=RANDOM))
    alone, over_ranks = np.load(tmp_path / "alone.npz"), np.load(tmp_path / "random.npz")
    assert over_ranks["tokens"].tolist() == alone["tokens"].tolist()
    np.testing.assert_allclose(over_ranks["logits"], alone["logits"], atol=1e-5)
