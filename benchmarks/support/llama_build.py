"""Builds llama.cpp for an instruction-set level, in its own environment in the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gapless.conf.user_path import user_cache
from gapless.kernels.processor import Level

VERSION = "0.3.36"  # of llama-cpp-python
# llama.cpp's names of instruction-set extensions, by Linux's names.
_OPTIONS = {
    "avx2": ("AVX", "AVX2"),
    "bmi2": ("BMI2",),
    "f16c": ("F16C",),
    "fma": ("FMA",),
    "avx_vnni": ("AVX_VNNI",),
    "avx512f": ("AVX512",),
    "avx512_vnni": ("AVX512_VNNI",),
    "avx512_bf16": ("AVX512_BF16",),
    "amx_tile": ("AMX_TILE",),
    "amx_int8": ("AMX_INT8",),
    "amx_bf16": ("AMX_BF16",),
}


def cmake_arguments(level: Level | None) -> str:
    """Return the CMake arguments for a level; None: for this machine's processor."""
    if level is None:
        return "-DGGML_NATIVE=ON"
    if level.machine != "x86_64":
        return f"-DGGML_NATIVE=OFF -DGGML_CPU_ARM_ARCH={level.flags[0].removeprefix('-march=')}"
    names = [name for need in sorted(level.needs) for name in _OPTIONS.get(need, ())]
    return " ".join(("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in names)))


def build(level: Level | None) -> Path:
    """Return the Python of an environment with llama.cpp for a level; build it if missing."""
    folder = user_cache() / f"llama-{VERSION}-{'native' if level is None else level.name}"
    python = folder / "bin" / "python"
    done = folder / "built"
    if not done.exists():
        print(f"building llama.cpp: {cmake_arguments(level)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        environment = os.environ | {"CMAKE_ARGS": cmake_arguments(level), "FORCE_CMAKE": "1"}
        install = [str(python), "-m", "pip", "install", "-qq", "--no-cache-dir", "--no-binary", "llama-cpp-python"]
        subprocess.run([*install, f"llama-cpp-python=={VERSION}", "numpy"], check=True, env=environment)
        done.touch()
    return python
