"""Libraries come from the wheel, else from the cache, else from the compiler: once, by whoever is first."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gapless.conf.user_path import user_cache
from gapless.kernels import cpp_build, processor
from gapless.kernels.cpp_build import Kernel, NoLibraryError, compile_for, compile_missing
from tests.support.forked import execute, finish

ROOT = Path(__file__).parents[2]
LEVEL = processor.level()
pytestmark = pytest.mark.skipif(LEVEL is None or not shutil.which("c++"), reason="no level of kernels, or no compiler")
SMALL = ("row_weight", "shared_memory")  # that are soon compiled


def small() -> list[Kernel]:
    assert LEVEL is not None
    return [Kernel(name, "float32", LEVEL) for name in SMALL]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache, and a compiler that keeps a list of what it compiles."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/compiled\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return user_cache()


def compiled(tmp_path: Path) -> list[str]:
    return sorted(re.findall(r"(\w+)\.cpp", (tmp_path / "compiled").read_text()))


def test_processes_that_start_together_compile_once(tmp_path: Path, cache: Path) -> None:
    code = """
import logging
from gapless.kernels.cpp_build import Kernel, compile_missing
from gapless.kernels.processor import level
logging.basicConfig(level=logging.INFO, format="%(message)s")
compile_missing([Kernel(name, "float32", level()) for name in ("row_weight", "shared_memory")])
"""
    ranks = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = sorted(rank.communicate()[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0] * 3
    assert said[:2] == ["", ""]
    assert re.fullmatch(rf"compiled 2 kernels for {LEVEL.name} in \d+\.\d s\n", said[2])
    assert compiled(tmp_path) == sorted(SMALL)
    assert {path.name for path in cache.iterdir()} == {"compile.lock", *(kernel.file for kernel in small())}


def test_what_a_wheel_brought_is_taken_first(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = small()
    compile_missing([first])
    monkeypatch.setattr(cpp_build, "_BUILT", tmp_path / "built")
    brought = tmp_path / "built" / first.level.name / first.file
    brought.parent.mkdir(parents=True)
    shutil.copyfile(cache / first.file, brought)
    assert first.find() == brought
    monkeypatch.setenv("CXX", "/nowhere/c++")
    compile_missing([first])
    with pytest.raises(FileNotFoundError, match="/nowhere/c"):
        compile_missing([first, second])
    shutil.rmtree(brought.parent)
    assert first.find() == cache / first.file


def test_another_header_type_or_level_has_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, other = small()[0], Kernel("row_weight", "bfloat16", processor.LEVELS[0])
    before = {kernel.file, other.file, *(Kernel("row_weight", "float32", level).file for level in processor.LEVELS)}
    assert len(before) == len(processor.LEVELS) + 1
    shutil.copytree(ROOT / "kernels" / "cpp", tmp_path / "cpp")
    monkeypatch.setattr(cpp_build, "SOURCES", tmp_path / "cpp")
    assert kernel.file in before
    (tmp_path / "cpp" / "element.h").write_text("")
    assert kernel.file not in before


def test_the_others_are_compiled_where_one_cannot_be(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(ROOT / "kernels" / "cpp", tmp_path / "cpp")
    monkeypatch.setattr(cpp_build, "SOURCES", tmp_path / "cpp")
    (tmp_path / "cpp" / "shared_memory.cpp").write_text("int x = nothing;")
    caplog.set_level(logging.INFO)
    with pytest.raises(NoLibraryError, match=r"compiler failed: .*shared_memory.cpp:1:9: error: "):
        compile_missing(small())
    assert "compiled 1 kernel for " in caplog.text
    assert [kernel.find() is not None for kernel in small()] == [True, False]
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX")
    with pytest.raises(NoLibraryError, match=r"there is no C\+\+ compiler \(c\+\+ or g\+\+\)"):
        compile_missing(small())
    compile_for("float32")  # whoever needs one meets the error
    cache.chmod(0o777)
    with pytest.raises(NoLibraryError, match="gapless can be written to by anyone"):
        small()[0].find()


THREADS = """
import re
from pathlib import Path
import torch
from gapless.kernels.operators.cpp import CppKernels
torch.set_num_threads(3)
tasks = lambda: len(list(Path("/proc/self/task").iterdir()))
x = torch.randn(2000, 2048)
alone = tasks()
x.exp_()
used = tasks()
CppKernels(torch.float32).gated_silu(x)
mapped = Path("/proc/self/maps").read_text()
libraries = set(re.findall(r"\\S*/lib(?:gomp|omp|iomp5)\\b\\S*", mapped))
print(len(libraries), used - alone, tasks() - used, "gapless/operators-float32-" in mapped or "built" in mapped)
"""


def test_libraries_share_torchs_threads() -> None:
    """Two more threads start for torch's operator, and none for ours, from the one OpenMP library that is mapped."""
    compile_for("float32")
    assert finish(execute, THREADS, []).stdout == "1 2 0 True\n"


def test_libraries_name_no_path_and_no_openmp() -> None:
    compile_for("float32")
    (kernel,) = [each for each in cpp_build.kernels((LEVEL,), ("float32",)) if each.name == "operators"]
    said = subprocess.run(["readelf", "-dsW", kernel.find()], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\((?:NEEDED|RPATH|RUNPATH)\).*\[(.*)\]", said)
    assert "libc.so.6" in needed
    assert all(re.match(r"lib(c|m|gcc_s|stdc\+\+)\.so\.\d$|ld-linux", each) for each in needed)
    assert re.search(r"UND GOMP_parallel$", said, re.MULTILINE)


def build_wheel(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Have setup.py make a wheel of the kernels alone."""
    for each in ("conf", "kernels"):
        shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.py", folder)
    (folder / "src" / "gapless").mkdir(parents=True)
    settings = "[metadata]\nname = gapless\n[options]\npackages = gapless.kernels\npackage_dir =\n  =src"
    (folder / "setup.cfg").write_text(settings)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"CXX": "/nowhere/c++"}, "the wheel's kernels are not compiled: .*'/nowhere/c.*; GAPLESS_KERNELS=none makes"),
        ({"GAPLESS_KERNELS": "some"}, "GAPLESS_KERNELS=some: must be one of all, none, native"),
    ],
)
def test_a_wheel_that_cannot_be_made_says_why_in_a_line(tmp_path: Path, environment: dict[str, str], why: str) -> None:
    done = build_wheel(tmp_path, **environment)
    assert done.returncode == 1
    assert re.match(why, done.stderr.splitlines()[-1])


def test_a_wheel_without_kernels_is_for_any_machine_and_needs_no_compiler(tmp_path: Path) -> None:
    done = build_wheel(tmp_path, CXX="/nowhere/c++", GAPLESS_KERNELS="none")
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == "gapless-0.0.0-py3-none-any.whl"
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_each_cpp_file_has_its_signatures_in_one_file_of_the_room() -> None:
    texts = [path.read_text() for path in (ROOT / "kernels").rglob("*.py")]
    named = [name for text in texts for name in re.findall(r'CppFile\(\s*"(\w+)"', text)]
    assert sorted(named) == sorted({each.name for each in cpp_build.kernels((LEVEL,))})
