"""Folders of small models of `transformers`, with the greedy tokens and logits that they give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gapless.kernels.processor import multiplies_bfloat16

NEW = 8


def prompts_of(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in (37, 1, 18, 29)]


def reference(model: transformers.PreTrainedModel, prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Compute greedy tokens [requests, NEW] and their logits, from the whole text again for each token."""
    tokens, logits = [], []
    with torch.inference_mode():
        for prompt in prompts:
            text, rows = list(prompt), []
            for _ in range(NEW):
                rows.append(model(torch.tensor([text]), use_cache=False).logits[0, -1].float().numpy())
                text.append(int(rows[-1].argmax()))
            tokens.append(text[len(prompt) :])
            logits.append(rows)
    return np.asarray(tokens), np.asarray(logits)


class Folders(dict[str, tuple[Path, np.ndarray, np.ndarray]]):
    """For each family, a folder of its model, and the reference's tokens and logits; made when first asked for."""

    def __init__(
        self, families: Mapping[str, transformers.PretrainedConfig], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        super().__init__()
        self._families = families
        self._make_folder = tmp_path_factory.mktemp

    def __missing__(self, name: str) -> tuple[Path, np.ndarray, np.ndarray]:
        torch.set_num_threads(1)
        torch.manual_seed(11)
        model = transformers.AutoModelForCausalLM.from_config(self._families[name]).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():  # norms and biases too, which start at 1 and 0
                if parameter.dim() == 1:
                    parameter += 0.3 * torch.randn_like(parameter)
                if key.endswith("e_score_correction_bias"):
                    parameter += 0.3 * torch.randn_like(parameter)
                if key.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter *= 2
            for key, buffer in model.named_buffers():  # which correct the choice of experts, and start at 0
                if key.endswith("e_score_correction_bias"):
                    buffer += 0.3 * torch.randn_like(buffer)
        folder = self._make_folder(name)
        model.save_pretrained(folder, max_shard_size="30KB" if name == "llama-gqa" else "1GB")
        self[name] = (folder, *reference(model, prompts_of(101)))
        return self[name]


def quantized_tolerance(half_scales: bool = False) -> float:
    """Return by how much logits of quantized weights may differ, relative to the largest.

    Where this level of instruction sets has no bfloat16, each product rounds activations to 16 bits, 2e-5 of its size,
    and `WeightFormat.half_scales` by 2^-12, 2e-4 to 4e-4 of it.
    """
    return 2e-4 if multiplies_bfloat16() else 1.5e-2 if half_scales else 2e-3


def check(path: Path, tokens: np.ndarray, logits: np.ndarray, tolerance: float = 2e-4) -> None:
    got = np.load(path)
    assert got["tokens"].tolist() == tokens.tolist()
    np.testing.assert_allclose(got["logits"], logits, atol=tolerance * np.abs(logits).max())


def job(out: Path, **over: Any) -> dict[str, Any]:
    return {"prompts": prompts_of(101), "num_new": NEW, "chunks": [7], "scattered": False, "out": str(out), **over}
