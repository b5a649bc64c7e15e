"""The limits of the machine: one line each."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gapless.launch.commands import COMMANDS
from tests.support.tiers import HANGS_S

SIMULATE = ("simulate", "scheduler=sarathi", "workload=fixed", "workload.num_prompts=200", "workload.input_len=100")
GONE = "gapless: error: the working directory has been deleted; change to an existing one\n"


def run(folder: Path, *arguments: str, first: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gapless", *arguments]
    return subprocess.run(command, cwd=folder, preexec_fn=first, capture_output=True, text=True, timeout=HANGS_S)


def files(soft: int, hard: int) -> Callable[[], object]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


RANKED = [name for name, command in COMMANDS.items() if command.has_ranks][:4]


@pytest.mark.parametrize(("command", "hard"), [*((name, 127) for name in RANKED), (RANKED[0], 32), (RANKED[1], 64)])
def test_too_few_files_are_one_line(tmp_path: Path, command: str, hard: int) -> None:
    done = run(tmp_path, command, first=files(hard, hard))
    assert (done.returncode, done.stdout) == (2, "")
    line = f"gapless: error: 128 open files are needed, and the limit is {hard} (ulimit -Hn); raise it\n"
    assert done.stderr == line


def test_a_low_soft_limit_is_raised(tmp_path: Path) -> None:
    done = run(tmp_path, "generate", "model=tiny", "prompt=x", "sampling.max_tokens=2", first=files(20, 4096))
    assert done.returncode == 0, done.stderr


def test_fewer_connections_are_advised_where_some_fit(tmp_path: Path) -> None:
    done = run(tmp_path, "serve", "model=tiny", "serve.max_connections=300", first=files(200, 200))
    assert "serve.max_connections=300: 428 open files are needed, and the limit is 200 (ulimit -Hn)" in done.stderr
    assert "or use serve.max_connections=72" in done.stderr


@pytest.mark.parametrize("command", [name for name, command in COMMANDS.items() if command.positional is None])
def test_a_deleted_working_folder_is_one_line(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    done = run(folder, command, *(("prompt=x",) if command == "generate" else ()), first=folder.rmdir)
    assert (done.returncode, done.stderr) == (1, GONE)


def file_size(limit: int) -> Callable[[], object]:
    def bounded() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return bounded


@pytest.mark.parametrize("words", [("hydra.run.dir={}",), ("-m", "seed=1,2", "hydra.sweep.dir={}")])
def test_a_full_disk_under_the_files_of_hydra_is_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(tmp_path, *SIMULATE, *(word.format(tmp_path / "run") for word in words), first=file_size(500))
    assert done.returncode == 1
    assert re.search(rf"gapless: error: {tmp_path}/run\S*: File too large", done.stderr.splitlines()[-1])


@pytest.mark.parametrize("limit", [200, 3_000, 8_000, 20_000, 100_000])
def test_a_file_that_cannot_grow_is_named_and_none_is_left_in_part(tmp_path: Path, limit: int) -> None:
    run_dir = f"hydra.run.dir={tmp_path / 'run'}"
    done = run(tmp_path, *SIMULATE, "hydra.output_subdir=null", run_dir, first=file_size(limit))
    errors = [line for line in done.stderr.splitlines() if line.startswith("gapless: error: ")]
    assert (done.returncode, len(errors)) == (1, 1)
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "run") in errors[0]
    assert "File too large" in errors[0]
    left = list((tmp_path / "run").rglob("*"))
    assert not [path for path in left if path.name.endswith(".part")]
    for path in left:
        if path.suffix == ".json":
            json.loads(path.read_text())
        assert path.name != "report.html" or path.read_text().rstrip().endswith("</html>")
