"""Imports keep the order of the rooms that `[tool.importlinter]` in pyproject.toml states."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("launch", "runtime", "models", "parallel", "conf")
LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))"


def modules_of(*folders: str) -> list[str]:
    """The modules of these folders of the repository, as they are imported."""
    files = [file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).rglob("*.py")]
    names = [".".join(("gapless", *file.with_suffix("").parts)) for file in files]
    return sorted(name.removesuffix(".__init__") for name in names)


def test_every_import_is_one_that_the_rooms_allow() -> None:
    done = subprocess.run([sys.executable, "-c", LINT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_the_check_reads_every_file(room: str) -> None:
    graph = grimp.build_graph(f"gapless.{room}", cache_dir=None)
    assert sorted(graph.modules) == modules_of(room)


def test_what_plans_simulates_and_reports_loads_no_torch() -> None:
    rooms = [path.name for path in (ROOT / "runtime").iterdir() if (path / "__init__.py").is_file()]
    modules = modules_of("conf", *(f"runtime/{room}" for room in sorted({*rooms} - {"pipeline", "profiling"})))
    code = (
        f"import sys, {', '.join(modules)}\nprint([name for name in ('torch', 'ray', 'hydra') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
