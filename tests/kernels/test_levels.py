"""The C++ of each level of instruction sets against plain loops: this machine's levels, and Arm's by emulation."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from gapless.conf.errors import ConfigError
from gapless.kernels import cpp_build, processor
from gapless.kernels.processor import LEVELS, Level

HERE = Path(__file__).parent
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"  # Debian has both, as packages of these names or nearly
SOURCES = ["quantized", "packed", "row_weight", "attention"]
RUNS_HERE = [level for level in processor.levels() if level.machine == platform.machine()]
EMULATED = [level for level in LEVELS if level.machine == "aarch64" != platform.machine()]


def check(
    compiler: str, level: Level, source: str, element: str, run: list[str], folder: Path, optimization: str = "-O3"
) -> None:
    program, file = folder / "check", cpp_build.SOURCES / f"{source}.cpp"
    names = [f"-DELEMENT={element}", f'-DSOURCE="{file}"', f"-DCHECK_{source.upper()}"]
    flags = [*(flag for flag in cpp_build.COMPILE if flag != "-fPIC"), optimization, *names, "-static"]
    command = [compiler, *level.flags, *flags, str(HERE / "check_level.cpp"), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [*run, str(program)], env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("element", ["float", "BFloat16"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "level",
    [pytest.param(level, marks=pytest.mark.slow if level in RUNS_HERE[1:-1] else ()) for level in RUNS_HERE],
    ids=lambda level: level.name,
)
def test_levels_of_this_machine(level: Level, source: str, element: str, tmp_path: Path) -> None:
    """At -O1, which compiles in half the time; `tests/launch/test_levels.py` runs the libraries as they are shipped."""
    compiler = shutil.which("c++") or pytest.skip("needs a C++ compiler")
    check(compiler, level, source, element, [], tmp_path, "-O1")


@pytest.mark.slow
@pytest.mark.parametrize("element", ["float", "BFloat16"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("level", EMULATED, ids=lambda level: level.name)
def test_levels_of_arm(level: Level, source: str, element: str, tmp_path: Path) -> None:
    if shutil.which(CROSS) is None or shutil.which(EMULATOR) is None:
        pytest.skip(f"needs {CROSS} and {EMULATOR}")
    check(CROSS, level, source, element, [EMULATOR, "-cpu", "max"], tmp_path)


def test_a_level_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.VARIABLE, "x86-64-v9")
    with pytest.raises(ConfigError, match="GAPLESS_MARCH=x86-64-v9: there is no such level; this processor has "):
        processor.level()
    other = next(level for level in LEVELS if level not in RUNS_HERE)
    monkeypatch.setenv(processor.VARIABLE, other.name)
    with pytest.raises(ConfigError, match=f"GAPLESS_MARCH={other.name}: this processor lacks it"):
        processor.level()
    for level in RUNS_HERE:
        monkeypatch.setenv(processor.VARIABLE, level.name)
        assert processor.level() == level
