"""Imports keep the order of the rooms that `[tool.importlinter]` in pyproject.toml states."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.tiers import HANGS_S

ROOT = Path(__file__).parent.parent
LINT = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True, no_logo=True))"
MODULES = "import grimp, json; print(json.dumps(sorted(grimp.build_graph('gapless', cache_dir=None).modules)))"


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S)


def modules_of(*folders: str) -> list[str]:
    """Return the modules of these folders of the repository, as they are imported."""
    files = [file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).rglob("*.py")]
    names = [".".join(("gapless", *file.with_suffix("").parts)) for file in files]
    return sorted(name.removesuffix(".__init__") for name in names)


def test_every_import_is_one_that_the_rooms_allow() -> None:
    done = python(LINT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_tools_follow_the_links_of_the_package() -> None:
    """A plain editable install is a path to `src`; what reads folders finds the rooms there."""
    done = python(MODULES)
    rooms = modules_of("launch", "runtime", "models", "parallel", "kernels", "conf")
    assert json.loads(done.stdout) == sorted([*rooms, "gapless", "gapless.__main__"]), done.stderr


def test_what_plans_simulates_and_reports_loads_no_torch() -> None:
    computing = ("gapless.runtime.pipeline", "gapless.runtime.simulation.profiling")
    modules = [name for name in modules_of("conf", "runtime") if not name.startswith(computing)]
    code = (
        f"import sys, {', '.join(modules)}\nprint([name for name in ('torch', 'ray', 'hydra') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
