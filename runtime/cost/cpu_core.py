"""The constants of a CPU core. Cores differ too much to predict seconds by them: layers are compared, no more."""

from __future__ import annotations

from functools import cache

from ...conf.costs import AttentionConfig, AttentionFamilies, CostsConfig, GemmConfig, LinkConfig, PointwiseConfig
from ...conf.sampling import SamplingParams

_LINK = LinkConfig(least_us=30.0, ramp_us=0.0, gigabytes_per_s=5.0, knee=1.0)


@cache
def cpu_core(dtype_bytes: int) -> CostsConfig:
    """Return the constants for numbers of so many bytes.

    They are of `gapless profile`'s operators on one core of a Xeon with AMX: LLaMA 160M in float32 and bfloat16, and
    SmolLM2-135M in Q4_1, 1 to 32 decodes of 64 and 512 tokens and chunks of 64 and 256.
    """
    tflops = 0.8 if dtype_bytes == 2 else 0.3  # the latter for 2 bytes, as of all devices
    gemm = GemmConfig(
        tiles=("1x16",),
        tflops=(tflops,),
        whole_waves=(0.0,),
        fade=0.0,
        sustained_tflops=1e3,
        launch_us=25.0,
        wave_us=0.0,
        split_us=1e6,
        split_share=0.0,
        memory_gigabytes_per_s=10.0,
        knee=1.0,
    )
    pointwise = PointwiseConfig(
        launch_us=20.0,
        element_ns=0.0,
        norm_gigabytes_per_s=10.0,
        rope_gigabytes_per_s=10.0,
        activation_gigabytes_per_s=10.0,
        add_gigabytes_per_s=10.0,
        copy_gigabytes_per_s=10.0,
        embedding_gigabytes_per_s=2.0,
    )
    attention = AttentionConfig(
        chunk_launch_us=60.0,
        chunk_split_us=1e6,
        chunk_tflops=0.1,
        chunk_self=0.5,
        chunk_waves=0.0,
        chunk_spread=1.0,
        chunk_copy_gigabytes_per_s=10.0,
        decode_launch_us=60.0,
        decode_split_us=1e6,
        decode_wave_us=0.0,
        decode_gigabytes_per_s=12.0,
        decode_waves=0.0,
        decode_spread=1.0,
        decode_token_ns=0.0,
        decode_tokens=1.0,
    )
    families = AttentionFamilies(flashinfer=attention, flash_attention=attention, xformers=attention)
    return CostsConfig(
        multiprocessors=1,
        gemm=gemm,
        pointwise=pointwise,
        attention=families,
        all_reduce=_LINK,
        node=_LINK,
        network=_LINK,
    )


def sampled_row_seconds(vocab_size: int, sampling: SamplingParams) -> float:
    """Return the seconds of sampling a token on such a core: 0.03 ms of 49,152 logits, 0.25 if drawn, 0.7 by top-p."""
    per_logit_ns = 0.6 if sampling.is_greedy else 5.0 if sampling.top_p == 1.0 else 14.0
    return vocab_size * per_logit_ns * 1e-9
