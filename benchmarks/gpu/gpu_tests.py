"""Runs the project's GPU tests with pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

from ..support.results import ROOT
from .parts import Task
from .rows import Row, checked

MARK = "pytest.mark.gpu"


def gpu_tests(task: Task) -> Iterator[Row]:
    """Run them in a separate process. On a GPU none may be skipped."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text(encoding="utf-8"))
    command = (sys.executable, "-m", "pytest", "-m", "gpu", "--all", "-rfEs", "-p", "no:cacheprovider")
    done = subprocess.run((*command, *map(str, files)), cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1])}
    setting = f"pytest -m gpu, {len(files)} files"
    yield Row(part="tests", quantity="passed", setting=setting, value=counts.get("passed", 0))
    for word in ("failed", "error"):
        yield checked("tests", word, setting, counts.get(word, 0), 0)
    if task.device == "cuda":
        yield checked("tests", "skipped", setting, counts.get("skipped", 0), 0)
    if not counts:
        note = (done.stderr.splitlines() or lines)[-1][:160]
        yield Row(part="tests", quantity="pytest", setting=setting, status="FAIL", note=note)
    for line in lines:
        if line.startswith(("FAILED", "ERROR")) or (line.startswith("SKIPPED") and task.device == "cuda"):
            yield Row(part="tests", quantity=line.split()[0].lower(), note=line.partition(" ")[2][:200])
