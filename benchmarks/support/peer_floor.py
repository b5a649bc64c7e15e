"""Measures the GEMM rate of a model's layers for `benchmarks/peer.py`. The argument is a job in JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import torch

from gapless.conf.architecture import Architecture
from gapless.conf.schema import ModelConfig
from gapless.kernels.packed import pack
from gapless.kernels.quantized import Product, make_product
from gapless.kernels.quantized_matrix import QuantizedMatrix, WeightFormat
from gapless.models.checkpoint import Checkpoint

ROWS, ROUNDS = 256, 7
MOST_LAYERS = 12


class Products:
    """The GEMMs of a model's layers, run layer by layer so that weights are cold.

    With a `format`, weights are quantized; group 0 is a whole row.
    """

    def __init__(
        self, arch: Architecture, dtype: torch.dtype = torch.float32, format: WeightFormat | None = None
    ) -> None:
        H, heads, width = arch.hidden_size, arch.num_heads * arch.head_dim, arch.ffn_size
        if arch.experts is not None:  # the routed experts of a token, as one
            width = arch.experts.experts_per_token * arch.expert_size
        self.shapes = [
            ((arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim, H),
            (H, heads),
            (width * (2 if arch.gated_ffn else 1), H),
            (H, width),
        ]
        self.dtype, self.format = dtype, format
        self.layers = [
            [self._product(*shape) for shape in self.shapes] for _ in range(min(arch.num_layers, MOST_LAYERS))
        ]

    def _product(self, out_size: int, in_size: int) -> Product:
        if self.format is None:
            packed = pack((torch.randn(out_size, in_size) * 0.02).to(self.dtype))
            assert packed is not None
            return packed
        format = replace(self.format, group=self.format.group or in_size)
        matrix = QuantizedMatrix.empty(out_size, in_size, format, "cpu")
        matrix.codes.random_(256)
        matrix.scales.fill_(0.01)
        if matrix.offsets is not None:
            matrix.offsets.fill_(-0.01 * format.zero)
        return make_product(matrix, self.dtype)

    @property
    def elements(self) -> int:
        """Weight elements of a layer."""
        return sum(out * size for out, size in self.shapes)

    @torch.inference_mode()
    def seconds(self, rows: int) -> float:
        """Return the minimum seconds of one layer's GEMMs with `rows` rows."""
        inputs = [torch.randn(rows, size).to(self.dtype) for _, size in self.shapes]
        best = float("inf")
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            for layer in self.layers:
                for x, weight in zip(inputs, layer, strict=True):
                    weight.linear(x)
            best = min(best, time.perf_counter() - begin)
        return best / len(self.layers)


def main() -> None:
    job = json.loads(sys.argv[1])
    arch = Checkpoint.open(ModelConfig(weights=job["model"])).arch
    products = Products(arch, getattr(torch, job["dtype"]))
    flops = 2 * products.elements
    rate = flops * ROWS / products.seconds(ROWS)
    print("first", flush=True)
    work = {"flops_a_token": flops * arch.num_layers, "flops_a_sample": 2 * arch.embedding_params}
    print(json.dumps({"gflops": rate / 1e9, **work}))


if __name__ == "__main__":
    main()
