"""Imports keep the order of the rooms that `[tool.importlinter]` in pyproject.toml states."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.tiers import HANGS_S

ROOT = Path(__file__).parent.parent
LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))"
MODULES = "import grimp, json; print(json.dumps(sorted(grimp.build_graph('gapless', cache_dir=None).modules)))"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay the package out in a folder as it installs: the linter does not know the mapping of pyproject.toml."""
    folder = tmp_path_factory.mktemp("tree")
    mapping = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    others = shutil.ignore_patterns("package", "shipped", "__pycache__")  # `package` is mapped by itself
    for package, source in mapping.items():
        shutil.copytree(ROOT / source, folder.joinpath(*package.split(".")), ignore=others, dirs_exist_ok=True)
    return folder


def with_tree(tree: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS_S
    )


def modules_of(*folders: str) -> list[str]:
    """Return the modules of these folders of the repository, as they are imported."""
    files = [file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).rglob("*.py")]
    names = [".".join(("gapless", *file.with_suffix("").parts)) for file in files]
    names = [name.replace("gapless.launch.package", "gapless") for name in names]
    return sorted(name.removesuffix(".__init__") for name in names)


def test_every_import_is_one_that_the_rooms_allow(tree: Path) -> None:
    done = with_tree(tree, LINT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_reads_every_file(tree: Path) -> None:
    done = with_tree(tree, MODULES)
    assert json.loads(done.stdout) == modules_of("launch", "runtime", "models", "parallel", "kernels", "conf"), (
        done.stderr
    )


def test_what_plans_simulates_and_reports_loads_no_torch() -> None:
    rooms = [path.name for path in (ROOT / "runtime").iterdir() if (path / "__init__.py").is_file()]
    modules = modules_of("conf", *(f"runtime/{room}" for room in sorted({*rooms} - {"pipeline", "profiling"})))
    code = (
        f"import sys, {', '.join(modules)}\nprint([name for name in ('torch', 'ray', 'hydra') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
