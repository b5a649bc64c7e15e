"""Measures the rate of the products of a model's layers for `benchmarks/peer.py`. Its argument is the job, as JSON."""

from __future__ import annotations

import json
import sys
import time

import torch

from gapless.conf.schema import ModelConfig
from gapless.models.huggingface import resolve_architecture
from gapless.parallel.packed import PackedWeight

ROWS, ROUNDS = 256, 7


def main() -> None:
    job = json.loads(sys.argv[1])
    arch = resolve_architecture(ModelConfig(weights=job["model"]))
    H, heads = arch.hidden_size, arch.num_heads * arch.head_dim
    shapes = [
        ((arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim, H), (H, heads),
        (arch.ffn_size * (2 if arch.gated_ffn else 1), H), (H, arch.ffn_size),
    ]  # fmt: skip
    layers = [[PackedWeight(torch.randn(shape) * 0.02) for shape in shapes] for _ in range(min(arch.num_layers, 12))]
    inputs = [torch.randn(ROWS, size) for _, size in shapes]
    flops = 2 * sum(out * size for out, size in shapes)
    best = 0.0
    with torch.inference_mode():
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            for layer in layers:
                for x, weight in zip(inputs, layer, strict=True):
                    weight.linear(x)
            best = max(best, flops * len(layers) * ROWS / (time.perf_counter() - begin))
    print("first", flush=True)
    print(json.dumps({
        "gflops": best / 1e9, "flops_a_token": flops * arch.num_layers, "flops_a_sample": 2 * arch.embedding_params,
        "seconds": 0.0,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
