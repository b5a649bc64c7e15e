"""The package `gapless` itself: what it offers a program, and `python -m gapless`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import gapless
from tests.support.tiers import HANGS_S


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=HANGS_S, check=True)
    return done.stdout


def test_the_package_has_the_python_api_and_its_version() -> None:
    for name in gapless.__all__:
        assert getattr(getattr(gapless, name), "__name__", name) == name
    assert gapless.__version__ == version("gapless")
    assert {*gapless.__all__} <= {*dir(gapless)}
    with pytest.raises(ImportError, match="nothing_of_the_kind"):
        from gapless import nothing_of_the_kind  # type: ignore[attr-defined]  # noqa: F401


def test_python_m_gapless_is_the_command() -> None:
    assert run("-m", "gapless", "--version") == f"gapless {version('gapless')}\n"
    assert run("-m", "gapless", "--help") == run("-m", "gapless.launch.cli", "--help")


def test_importing_the_package_loads_none_of_its_rooms() -> None:
    code = "import sys, gapless; gapless.__version__; print([name for name in sys.modules if name[:8] == 'gapless.'])"
    assert run("-c", code) == "[]\n"
