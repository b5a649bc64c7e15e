"""Tab completion: candidates for a line, and a real bash that asks for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gapless.conf.build import group_names
from gapless.launch.commands import COMMANDS
from gapless.launch.completion import answer, candidates
from tests.support.tiers import HANGS_S

PROGRAM = Path(sys.executable).parent / "gapless"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("gapless ge", ["generate"]),
        ("gapless --v", ["--version"]),
        ("gapless generate --mu", ["--multirun"]),
        ("gapless generate --cfg ", ["job"]),
        ("gapless generate -c j", ["job"]),
        ("gapless report --", ["--help", "--shell-completion", "--version"]),
        ("gapless generate sched", ["scheduler.", "scheduler="]),
        ("gapless generate +scheduler.chu", ["+scheduler.chunk="]),
        (
            "gapless generate seed=1 model.architecture.rop",
            ["model.architecture.rope_scaling.", "model.architecture.rope_theta="],
        ),
        ("gapless bench scheduler=sarathi,orca", ["scheduler=sarathi,orca_best", "scheduler=sarathi,orca_worst"]),
        ("gapless generate print_texts=", ["print_texts=false", "print_texts=true"]),
        ("gapless generate model.dtype=b", ["model.dtype=bfloat16"]),
        ("gapless simulate hydra.r", ["hydra.run."]),
        ("gapless simulate hydra/launcher=j", ["hydra/launcher=joblib"]),
        ("gapless report so", ["sort="]),
        ("gapless generate prompts=./fi", []),
        ("gapless nothing x", []),
    ],
)
def test_candidates(line: str, found: list[str]) -> None:
    assert candidates(line) == found


def test_every_command_and_every_choice_is_found() -> None:
    assert {*COMMANDS} < {*candidates("gapless ")}
    for group in ("model", "parallel", "hardware", "workload"):
        assert candidates(f"gapless bench {group}=") == [f"{group}={name}" for name in group_names(group)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_code_to_install_and_to_remove(shell: str) -> None:
    assert f"--shell-completion query={shell}" in answer(f"install={shell}")
    assert "_gapless" in answer(f"uninstall={shell}")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("gapless gen", ["generate "]),
        ("gapless generate scheduler=equ", ["equal_time"]),
        ("gapless generate prompts=x.jso", []),
    ],
)
def test_bash_completes_by_it(line: str, found: list[str]) -> None:
    script = f"""COMP_WORDBREAKS=' =:'
eval "$({PROGRAM} --shell-completion install=bash)"
_gapless {PROGRAM}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    environment = os.environ | {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=HANGS_S)
    assert done.stderr == ""
    assert [text for text in done.stdout.split("\n") if text] == found
