"""The instruction sets of this machine's processor, and the level that kernels use. Imports no torch.

For example, `GAPLESS_MARCH=x86-64-v3` limits kernels to a lower level that the processor supports.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..conf.errors import ConfigError

VARIABLE = "GAPLESS_MARCH"
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_BFLOAT16 = {"avx512_bf16", "amx_bf16"}


@dataclass(frozen=True, slots=True)
class Level:
    """A group of instruction sets. Kernels are compiled once per level.

    Attributes:
        name: a value of `GAPLESS_MARCH`.
        machine: a value of `platform.machine()`.
        needs: the extensions that it uses, by Linux's names.
        flags: compiler flags.
        torch: the value of ATEN_CPU_CAPABILITY that limits torch to this level; empty: there is none.
        onednn: the same for ONEDNN_MAX_CPU_ISA.
    """

    name: str
    machine: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    torch: str = ""
    onednn: str = ""

    @property
    def limits(self) -> dict[str, str]:
        """The environment variables that limit torch and oneDNN to this level."""
        values = {"ATEN_CPU_CAPABILITY": self.torch, "ONEDNN_MAX_CPU_ISA": self.onednn}
        return {name: value for name, value in values.items() if value}


_ARM = "-march=armv8"
# Per machine from the lowest to the highest.
LEVELS = (
    Level("x86-64-v3", "x86_64", _V3, ("-march=x86-64-v3",), "avx2", "AVX2"),
    Level("x86-64-v3-vnni", "x86_64", _V3 | {"avx_vnni"}, ("-march=x86-64-v3", "-mavxvnni"), "avx2", "AVX2_VNNI"),
    Level("x86-64-v4", "x86_64", _V4, ("-march=x86-64-v4",), "avx512", "AVX512_CORE"),
    Level("x86-64-v4-vnni", "x86_64", _VNNI, ("-march=x86-64-v4", "-mavx512vnni"), "avx512", "AVX512_CORE_VNNI"),
    Level(
        "x86-64-v4-bf16",
        "x86_64",
        _BF16,
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        "avx512",
        "AVX512_CORE_BF16",
    ),
    Level("amx", "x86_64", _BF16 | {"amx_bf16", "amx_int8", "amx_tile"}, ("-march=sapphirerapids",)),
    Level("armv8", "aarch64", frozenset({"asimd"}), (f"{_ARM}-a",)),
    Level("armv8-dotprod", "aarch64", frozenset({"asimd", "asimddp"}), (f"{_ARM}.2-a+dotprod",)),
    Level("armv8-i8mm", "aarch64", frozenset({"asimd", "asimddp", "i8mm"}), (f"{_ARM}.2-a+dotprod+i8mm",)),
)


@cache
def flags() -> frozenset[str]:
    """Return the processor's extensions by Linux's names; empty if there is no /proc/cpuinfo."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return frozenset(words.split())
    return frozenset()


def levels() -> tuple[Level, ...]:
    """Return the levels that this processor supports, the lowest first."""
    return tuple(level for level in LEVELS if level.machine == platform.machine() and level.needs <= flags())


def level() -> Level | None:
    """Return the level that `GAPLESS_MARCH` names, else the processor's highest; None if it supports none.

    Raises:
        ConfigError: the variable names an unknown level, or one that the processor does not support.
    """
    found, asked = levels(), os.environ.get(VARIABLE)
    if not asked:
        return found[-1] if found else None
    for each in found:
        if each.name == asked:
            return each
    names = ", ".join(each.name for each in found) or "no level that has kernels"
    problem = "this processor lacks it" if any(each.name == asked for each in LEVELS) else "there is no such level"
    raise ConfigError(f"{VARIABLE}={asked}: {problem}; this processor has {names}")


def lacking() -> str:
    """Return why this processor cannot run the kernels, and what to do; empty if it can."""
    if level() is not None:
        return ""
    lowest = next((each for each in LEVELS if each.machine == platform.machine()), None)
    if lowest is None:
        machines = " or ".join(dict.fromkeys(each.machine for each in LEVELS))
        return f"there are no kernels for {platform.machine()}; use {machines}"
    missing = ", ".join(sorted(lowest.needs - flags()))
    help_ = "use a processor or VM type that has them"
    return f"this processor lacks {missing} of {lowest.name}, or the virtual machine hides them; {help_}"


def multiplies_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 faster than float32, by AVX-512 BF16 or AMX."""
    found = level()
    return found is not None and not found.needs.isdisjoint(_BFLOAT16)
