"""A wrong key or value is answered before anything large is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gapless.launch.commands import COMMANDS

_PROGRAM = """
import sys
from gapless.launch.cli import main
code = main(sys.argv[2:])
print([code, sorted(set(sys.argv[1].split(",")) & sys.modules.keys())])
"""
_COMPOSED = sorted(name for name, command in COMMANDS.items() if command.positional is None)


@pytest.mark.parametrize(
    ("words", "large"),
    [
        *(([name, "modle=x"], "torch,ray,hydra,omegaconf,numpy,uvicorn,starlette.applications") for name in _COMPOSED),
        (["report", "modle=x"], "torch,ray,hydra,omegaconf,numpy"),
        (["serve", "serve.prot=1"], "torch,ray,hydra,omegaconf,numpy,uvicorn,starlette.applications"),
        (["serve", "--enable-loar"], "torch,ray,hydra,omegaconf,numpy,uvicorn,starlette.applications"),
        (["serve", "serve.port=x"], "torch,ray,numpy,uvicorn,starlette.applications"),
        (["serve", "scheduler=nope"], "torch,ray,numpy,uvicorn,starlette.applications"),
        (["serve", "model=shipped", "parallel=pp9"], "torch,ray"),
    ],
    ids=str,
)
def test_a_wrong_key_imports_nothing_large(words: list[str], large: str) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, large, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[2, []]"
    assert done.stderr.startswith("gapless: error: ")
    assert done.stderr.count("\n") == 1
