"""What this machine's processor offers. Imports no torch."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

_BFLOAT16 = {"avx512_bf16", "amx_bf16"}


@cache
def flags() -> frozenset[str]:
    """Return the processor's extensions by Linux's names; none where there is no /proc/cpuinfo."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(words.split())
    return frozenset()


def multiplies_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 faster than float32, by AVX-512 BF16 or AMX."""
    return not flags().isdisjoint(_BFLOAT16)
