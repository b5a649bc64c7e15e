"""Cost constants of a CPU core, only for comparing layers: cores differ too much to predict absolute times."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ....conf.build import build, read_yaml
from ....conf.costs import CostsConfig
from ....conf.sampling import SamplingParams


@cache
def cpu_core(dtype_bytes: int) -> CostsConfig:
    """Read the constants of `conf/cpu_core.yaml`, with the GEMM rate of a dtype of `dtype_bytes` bytes."""
    costs = build(CostsConfig, read_yaml("cpu_core"))
    return replace(costs, gemm=replace(costs.gemm, tflops=(0.8,))) if dtype_bytes == 2 else costs


def sampled_row_seconds(vocab_size: int, sampling: SamplingParams) -> float:
    """Return the seconds to sample a token on such a core: of 49,152 logits 0.03 ms greedy, 0.25 random, 0.7 top-p."""
    per_logit_ns = 0.6 if sampling.is_greedy else 5.0 if sampling.top_p == 1.0 else 14.0
    return vocab_size * per_logit_ns * 1e-9
