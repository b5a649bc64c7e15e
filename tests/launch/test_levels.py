"""Tests of kernels, quantized formats, experts and tokens pass at each level of instruction sets that this machine has.

The highest level is that of every other test. Each lower one runs in processes of its own, limited by `GAPLESS_MARCH`.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch

from gapless.conf.errors import ConfigError
from gapless.kernels import cpp_library, processor
from gapless.kernels.operators.select import make_kernels
from gapless.launch.cli import main
from gapless.launch.commands import COMMANDS
from tests.support.forked import gapless
from tests.support.tiers import EVERYTHING

ROOT = Path(__file__).parents[2]
FIRST, SHORT = "tests/kernels/test_quantized.py", "tests/kernels/test_row_weight.py"
PATTERNS = (
    *("tests/kernels/*.py", "tests/models/experts/*.py", "tests/models/test_quantized_folders.py"),
    *("tests/models/gguf/test_quantized.py", "tests/models/gguf/test_experts.py"),
    *("tests/kernels/operators/test_operators.py", "tests/models/test_cpp_attention.py"),
    *("tests/models/test_tokens.py", "tests/launch/test_tokens.py"),
)
# Independent of the level that a process runs at, or for none of these levels.
ONE_LEVEL = {
    *("test_cores.py", "test_cuda_products.py", "test_huge_pages.py", "test_tiled.py"),
    *("test_cpp_build.py", "test_levels.py"),
}
FOUND = (file for pattern in PATTERNS for file in ROOT.glob(pattern) if file.name not in ONE_LEVEL)
FILES = sorted(str(file.relative_to(ROOT)) for file in FOUND)
# Whole models in fp32, whose kernels differ between levels in the width of vectors alone.
TOKENS = ("tests/models/test_tokens.py", "tests/launch/test_tokens.py", "tests/models/experts/test_expert_tokens.py")
LEVELS = processor.levels()


def in_rooms(level: processor.Level) -> list[tuple[str, ...]]:
    """Return the files that run at a level, grouped by room: one process per room, as each start takes seconds."""
    files = [file for file in FILES if level == LEVELS[0] or file not in TOKENS]
    if level == LEVELS[0]:
        files.remove(FIRST)
    return [tuple(each) for _, each in groupby(files, lambda file: Path(file).parts[:2])]


# The first tier runs one file at the lowest level; and a short one at the highest, to try the run itself everywhere.
QUICK = [*((level, (FIRST,)) for level in LEVELS[:-1][:1]), *((level, (SHORT,)) for level in LEVELS[-1:])]
LONG = [(level, files) for level in LEVELS[:-1] for files in in_rooms(level)]


@pytest.mark.parametrize(
    ("level", "files"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)],
    ids=lambda value: "-".join(Path(value[0]).parts[1:2]) if isinstance(value, tuple) else value.name,
)
def test_a_level_s_kernels_compute_the_same(level: processor.Level, files: tuple[str, ...]) -> None:
    env = {name: value for name, value in os.environ.items() if name != EVERYTHING and "PYTEST" not in name}
    env |= {processor.VARIABLE: level.name, **level.limits}
    command = [sys.executable, "-m", "pytest", "-v", "-n0", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"\nkernels: {level.name}\n" in done.stdout
    for file in files:
        assert re.search(rf"^{file} \S*\.", done.stdout, re.MULTILINE), file


def test_the_files_are_there() -> None:
    assert {FIRST, SHORT, *TOKENS, "tests/models/experts/test_quantized.py"} <= set(FILES)
    assert len(FILES) > 12


def lacked() -> str:
    """Return a level that this processor lacks, if need be of another architecture."""
    return next(level.name for level in reversed(processor.LEVELS) if level not in LEVELS)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_starts_at_a_level_that_there_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for wrong, problem in ((lacked(), "this processor lacks it"), ("nonsense", "there is no such level")):
        monkeypatch.setenv(processor.VARIABLE, wrong)
        assert main([name]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith(f"gapless: error: GAPLESS_MARCH={wrong}: {problem}; this processor has ")


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_wrong_level_is_one_line_and_leaves_no_run_folder(command: str, tmp_path: Path) -> None:
    words = {"generate": ["model=tiny", "prompt=x"], "serve": ["model=tiny", "serve.port=0"]}[command]
    done = gapless(command, *words, cwd=tmp_path, env=os.environ | {processor.VARIABLE: lacked()})
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"gapless: error: GAPLESS_MARCH={lacked()}: this processor lacks it; .*\n", done.stderr)
    assert not list(tmp_path.iterdir())


def test_the_start_line_has_threads_cores_and_level(tmp_path: Path) -> None:
    done = gapless("generate", "model=tiny", "prompt=x", "sampling.max_tokens=2", "parallel.threads=3", cwd=tmp_path)
    own = processor.level()
    level = own.name if own else "no kernels for this processor"
    (line,) = [line for line in done.stderr.splitlines() if "starting tiny" in line]
    assert re.fullmatch(rf".* on 1 rank \(pp=1 x tp=1, local\), 3 threads \(\d.* cores?.*, {level}\)", line)


def test_what_a_processor_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = next(level for level in processor.LEVELS if level.machine == platform.machine())
    monkeypatch.setattr(processor, "flags", lambda: lowest.needs - {min(lowest.needs)})
    cpp_library.load.cache_clear()
    reason = make_kernels("auto", dtype=torch.float32, device=torch.device("cpu")).fallback_reason
    lack = f"this processor lacks {min(lowest.needs)} of {lowest.name}, or the virtual machine hides them"
    assert reason == f"{lack}; use a processor or VM type that has them"
    with pytest.raises(ConfigError, match=rf"^model\.kernels=cpp: {reason}; torch runs anywhere$"):
        make_kernels("cpp", dtype=torch.float32, device=torch.device("cpu"))
    cpp_library.load.cache_clear()
    monkeypatch.setattr(processor, "flags", lambda: lowest.needs)
    assert processor.lacking() == ""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert processor.lacking() == "there are no kernels for riscv64; use x86_64 or aarch64"
