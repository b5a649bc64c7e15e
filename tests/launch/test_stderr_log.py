"""What the package says goes through `logging`: a program has it as it likes, the command line in lines of its own."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gapless.launch.cli import main
from gapless.launch.stderr_log import messages_on_stderr

PROGRAM = """
import logging
from gapless import LLM
logging.basicConfig(filename="log", level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")
for level in (logging.NOTSET, logging.WARNING):
    logging.getLogger("gapless").setLevel(level)
    LLM("tiny", **{"parallel.threads": 1}).close()
    print("started")
"""
UNCONFIGURED = """
from gapless.conf.clusters import ClusterConfig
from gapless.conf.schema import HardwareConfig, ParallelConfig
from gapless.parallel.real_placement import Place
from gapless.runtime.pipeline.start_warnings import warn_of_placement
hosts = dict(enumerate("aba"))
places = {rank: Place(host) for rank, host in hosts.items()}
warn_of_placement(places, hosts, ParallelConfig(pp=3, launcher="ray"), HardwareConfig(), ClusterConfig())
"""


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_a_program_redirects_and_silences_the_package(tmp_path: Path) -> None:
    done = python("-c", PROGRAM, cwd=tmp_path, CXX="no-such-compiler", XDG_CACHE_HOME=".", GAPLESS_COMPILED="0")
    assert (done.stdout, done.stderr) == ("started\n" * 2, "")
    ours = [line for line in (tmp_path / "log").read_text().splitlines() if " gapless." in line]
    assert ours[0] == "INFO gapless.runtime.engine.llm: loading the model in this process"
    assert ours[1].startswith("DEBUG gapless.kernels.cpp_library: operators.cpp is not used: ")
    (warning,) = [line for line in ours[2:] if not line.startswith("DEBUG ")]
    assert warning.startswith("WARNING gapless.runtime.pipeline.start_warnings: ")
    assert "using torch's operators" in warning


def test_a_program_without_logging_sees_warnings(tmp_path: Path) -> None:
    done = python("-c", UNCONFIGURED, cwd=tmp_path, GAPLESS_COMPILED="0")
    assert done.stderr.startswith("stages change nodes 2 times where 1 would suffice (by stage: a, b, a)")


def test_messages_of_the_command_line_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    package, log = logging.getLogger("gapless"), logging.getLogger("gapless.runtime.engine.llm")
    before = package.level, package.propagate, [*package.handlers]
    with messages_on_stderr(), messages_on_stderr():
        log.debug("not shown")
        log.info("%s", "50% of it")
        log.warning("a rank\nfailed")
        log.error("an error")
        package.setLevel(logging.DEBUG)
        log.debug("a detail")
    assert (package.level, package.propagate, package.handlers) == before
    assert capsys.readouterr() == (
        "",
        "gapless: 50% of it\ngapless: warning: a rank failed\ngapless: error: an error\ngapless: debug: a detail\n",
    )
    assert main(["generat"]) == 2
    assert (package.level, package.propagate, package.handlers) == before


def test_messages_stand_above_a_bar_that_moves() -> None:
    with redirect_stderr(StringIO()) as printed, messages_on_stderr():
        console = Console(stderr=True, force_terminal=True, width=80, legacy_windows=False)
        with console.status("starting"):
            logging.getLogger("gapless.runtime").warning("a fault")
            logging.getLogger("gapless.runtime").info("mended")
    _, bar, after = re.split("gapless: (?:warning: a fault|mended)\n", printed.getvalue())
    assert "starting" in bar
    assert bar.endswith("\r\x1b[2K")  # its line is cleared
    assert "starting" in after


def test_hydras_own_logging_does_not_say_it_again(tmp_path: Path) -> None:
    words = ["-m", "gapless.launch.cli", "simulate", "workload.num_prompts=2", "hydra.run.dir=run"]
    plain = python(*words, cwd=tmp_path)
    done = python(*words, "hydra/job_logging=default", "hydra/hydra_logging=default", cwd=tmp_path)
    assert plain.stderr == done.stderr == "gapless: equal_time: 2/2 requests\n"
    assert "2/2 requests" not in done.stdout
