"""Measures the accuracy loss of low-precision types: `python -m benchmarks.precision`.

The trained SmolLM2-135M reads a text in windows of --context tokens, each from an empty cache. bfloat16, 8-bit KV
caches and weights quantized on load are compared with float32: mean KL divergence of the next-token distribution,
share of equal argmax tokens, and perplexity of the text. `kv_bytes` is per token.

The package's file has most weights in Q4_1, and quantizing to `int4` would reproduce exactly these values. So the
quantized model is the same model with permuted channels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gapless.conf.schema import ModelConfig
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.build_stage import build_stage
from gapless.models.checkpoint import Checkpoint
from gapless.models.gguf.smollm2 import smollm2
from gapless.models.memory import BYTES, kv_bytes_per_token
from gapless.models.stage_spec import StageSpec
from gapless.models.tokenizer import load_tokenizer
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous

from .support.harness import Benchmark, scratch
from .support.reordered import write_reordered

BLOCK = 16
TEXT = Path(__file__).parents[1] / "docs" / "ledger.md"


class Case(NamedTuple):
    """Types of a model and its KV cache."""

    model: dict[str, Any]  # model keys
    cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        cache = "" if self.cache_dtype == "auto" else f", cache.dtype={self.cache_dtype}"
        return ", ".join(f"{key}={value}" for key, value in self.model.items()) + cache


CASES = [Case({"dtype": dtype}, cache) for dtype in ("float32", "bfloat16") for cache in ("auto", "int8", "fp8")]
ROUNDED = [Case({"dtype": "bfloat16", "quantization": bits}) for bits in ("int8", "int4")]


def main() -> int:
    bench = Benchmark(__doc__, text=TEXT, tokens=3072, context=1024)
    given, file = bench.given, smollm2()
    arch = Checkpoint.open(ModelConfig(weights=str(file))).arch
    ids = load_tokenizer(file, arch.vocab_size).encode(given.text.read_text())[: given.tokens]
    windows = [ids[i : i + given.context] for i in range(0, len(ids), given.context)]
    references = list(log_probs(file, CASES[0], windows))
    with scratch() as folder:
        reordered = write_reordered(folder)
        for case in (*CASES, *ROUNDED):
            divergence = same = surprise = 0.0
            weights = reordered if case in ROUNDED else file
            for true, own, window in zip(references, log_probs(weights, case, windows), windows, strict=True):
                divergence += F.kl_div(own, true, log_target=True, reduction="sum").item()
                same += (own.argmax(-1) == true.argmax(-1)).sum().item()
                surprise -= own[torch.arange(len(window) - 1), window[1:]].sum().item()
            element = BYTES[Checkpoint.open(ModelConfig(weights=str(weights), **case.model)).dtype("cpu")]
            bench.row(
                "precision",
                numbers=case.name,
                kv_bytes=kv_bytes_per_token(arch, arch.num_layers, 1, element, case.cache_dtype),
                kl_millinats=1e3 * divergence / len(ids),
                same_token_share=same / len(ids),
                perplexity=torch.tensor(surprise / (len(ids) - len(windows))).exp().item(),
            )
    return bench.end()


@torch.inference_mode()
def log_probs(weights: Path, case: Case, windows: list[list[int]]) -> Iterator[torch.Tensor]:
    """Yield the next-token log-probabilities, [tokens, V], of each window."""
    model = ModelConfig(weights=str(weights), **case.model)
    arch = Checkpoint.open(model).arch
    blocks = range(-(-max(map(len, windows)) // BLOCK))
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        spec = StageSpec(
            model=model,
            arch=arch,
            layers=(0, arch.num_layers),
            num_blocks=len(blocks),
            block_size=BLOCK,
            cache_dtype=case.cache_dtype,
        )
        stage = build_stage(spec, groups)
        stage.pack()
        for window in windows:
            batch = RaggedBatch.of(window, [Segment(0, len(window), blocks)], [], range(len(window)))
            yield stage(stage.prepare(batch)).log_softmax(-1)


if __name__ == "__main__":
    sys.exit(main())
