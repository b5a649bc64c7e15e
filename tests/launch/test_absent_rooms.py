"""What serves works where the rooms that simulate and analyse are absent from the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

ROOT = Path(__file__).parents[2]
ABSENT = ("simulation", "analysis")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make a package that lacks two rooms of the runtime, and return an environment in which it is found first."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "gapless" / "runtime").mkdir(parents=True)
    for file in (ROOT / "src" / "gapless").iterdir():
        if file.name != "runtime":
            (folder / "gapless" / file.name).symlink_to(file.resolve())
    for file in (ROOT / "runtime").iterdir():
        if file.name not in ABSENT:
            (folder / "gapless" / "runtime" / file.name).symlink_to(file)
    return os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def run(environment: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gapless", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_prompts_run_through_a_pipeline_without_a_report(environment: dict[str, str], tmp_path: Path) -> None:
    keys = ("parallel=pp2", "parallel.launcher=process", "sampling.max_tokens=4", "hydra.run.dir=run")
    done = run(environment, tmp_path, "generate", "prompt=import os", *keys)
    assert done.returncode == 0, done.stderr
    assert "there will be no report: gapless.runtime.analysis is not installed" in done.stderr
    assert "stages get equal numbers of layers" in done.stderr
    (row,) = map(json.loads, (tmp_path / "run" / "outputs.jsonl").read_text().splitlines())
    assert len(row["outputs"][0]["token_ids"]) == 4


def test_a_server_answers_without_a_live_page(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gapless", "serve", "serve.port=0", "hydra.run.dir=run"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = ""
        while "takes requests at" not in (line := process.stderr.readline()):
            assert line, said
            said += line
        assert "no live page, recordings and idle times by cause: gapless.runtime.analysis is not installed" in said
        url = line.split()[-1].removesuffix("/v1")
        answer = httpx2.post(f"{url}/v1/completions", json={"prompt": "import os", "max_tokens": 3}, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert "gapless:generation_tokens_total" in (metrics := httpx2.get(f"{url}/metrics").text)
        assert "gapless:stage_idle_seconds" not in metrics
        for refused in (httpx2.get(f"{url}/"), httpx2.get(f"{url}/live/events"), httpx2.post(f"{url}/record")):
            assert refused.status_code == 501
            assert "gapless.runtime.analysis, which is not installed" in refused.json()["error"]["message"]
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "room"),
    [
        (("report", "."), "analysis"),
        (("explain", "."), "analysis"),
        (("diff", ".", "."), "analysis"),
        (("simulate",), "simulation"),
        (("tune",), "simulation"),
        (("bench",), "simulation"),
    ],
)
def test_a_command_that_needs_a_room_says_so_in_a_line(
    environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...], room: str
) -> None:
    done = run(environment, tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert (
        line == f"gapless: error: gapless {arguments[0]}: needs gapless.runtime.{room}, which this installation lacks"
    )
