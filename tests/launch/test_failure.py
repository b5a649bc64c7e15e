"""A rank that dies, hangs or fails to start ends the run with its own error; nothing stays behind, nor after Ctrl-C."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gapless.conf.build import load_group
from gapless.conf.sampling import SamplingParams
from gapless.launch.ray_launcher import RayLauncher
from gapless.runtime import LLM
from gapless.runtime.pipeline.protocol import PipelineError
from tests.support.processes import descendants_of, is_alive

LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


def assert_gone(pids: list[int], within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)


def pids_of(llm: LLM) -> list[int]:
    return [int(re.search(r"pid (\d+)", where)[1]) for where in llm.where]


@pytest.fixture
def llm(ray_launcher: RayLauncher) -> Iterator[LLM]:
    overrides = {"parallel.threads": 1, "parallel.step_timeout_s": 4.0}
    with LLM("tiny", pp=2, launcher=ray_launcher, **overrides) as llm:
        yield llm


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_within_seconds(llm: LLM, rank: int) -> None:
    pids = pids_of(llm)
    outputs = llm.stream([[1, 2, 3]] * 3, LONG)
    next(outputs)
    os.kill(pids[rank], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PipelineError, match=rf"rank {rank} \(stage {rank}\) died"):
        list(outputs)
    assert time.monotonic() - start < 10
    llm.close()
    assert_gone(pids)


def test_a_hung_stage_is_noticed(llm: LLM) -> None:
    pids = pids_of(llm)
    outputs = llm.stream([[1, 2, 3]] * 3, LONG)
    next(outputs)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(PipelineError, match=r"no progress within parallel\.step_timeout_s=4"):
        list(outputs)
    llm.close()
    assert_gone(pids)


def test_a_rank_that_fails_to_start_has_the_last_word(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resources.files("gapless.models") / "shipped", folder)

    class LosesTheFolder(RayLauncher):
        def start(self, *args: Any) -> None:
            shutil.rmtree(folder)
            super().start(*args)

    start = time.monotonic()
    with pytest.raises(PipelineError, match=r"rank \d \(stage \d\) failed: ConfigError: .*no such folder"):
        LLM(folder, pp=2, launcher=LosesTheFolder())
    assert time.monotonic() - start < 60


def test_a_bad_checkpoint_is_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2,'
        ' "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}'
    )
    save_file({"model.embed_tokens.weight": torch.zeros(300, 32)}, tmp_path / "model.safetensors")
    launcher = RayLauncher()
    with pytest.raises(ValueError, match=r"tensor \S+, of shape \[\d+.*\], is missing"):
        LLM(tmp_path, pp=2, launcher=launcher, **{"model.tokenizer": "none"})
    assert launcher.poll() == {}


DRIVER = """
    from gapless.runtime import LLM, SamplingParams

    with LLM("tiny", pp=2, launcher="ray", **{"parallel.threads": 1}) as llm:
        for _ in llm.stream([[1, 2, 3]], SamplingParams(max_tokens=2000, ignore_eos=True)):
            print(*llm.where, sep=",", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_outlives_the_driver(how: signal.Signals, tmp_path: Path) -> None:
    if how is signal.SIGKILL:
        command = [sys.executable, "-c", textwrap.dedent(DRIVER)]
    else:  # as a user at a terminal would
        command = [
            *(sys.executable, "-m", "gapless.launch.cli", "generate", "model=tiny", "parallel=pp2", "prompt=abc"),
            *("sampling.max_tokens=2000", "sampling.ignore_eos=true", "parallel.threads=1"),
        ]
    driver = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    stream = driver.stdout if how is signal.SIGKILL else driver.stderr
    assert stream is not None
    line = ""
    for line in stream:
        if "pid" in line or "tok/s" in line:
            break
    else:
        pytest.fail(f"it never came to compute: {line}")
    # Of a driver that had no chance to end them, Ray's own agents may linger; its ranks must not.
    descendants = descendants_of(driver.pid)
    family = descendants if how is not signal.SIGKILL else [int(p) for p in re.findall(r"pid (\d+)", line)]
    assert len(family) >= 2
    start = time.monotonic()
    if how is signal.SIGINT:
        os.killpg(driver.pid, how)
    else:
        os.kill(driver.pid, how)
    _, stderr = driver.communicate(timeout=30)
    assert time.monotonic() - start < 20
    assert driver.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[how]
    if how is signal.SIGINT:
        assert stderr.strip().splitlines()[-1] == "gapless: interrupted"
        assert len(list(tmp_path.glob("runs/*/report.html"))) == 1
    assert "Traceback" not in stderr
    assert_gone(family)
    for pid in filter(is_alive, descendants):
        os.kill(pid, signal.SIGKILL)


def test_too_many_ranks_for_the_cluster_is_one_line(ray_launcher: RayLauncher) -> None:
    with pytest.raises(ValueError, match=r"parallel\.pp=2: each stage needs a node with 1 CPU and 1 GPU"):
        LLM("tiny", pp=2, launcher=RayLauncher(), hardware="a100-80g")
    assert load_group("hardware", "a100-80g")["device"] == "cuda"


def test_ranks_run_at_the_priority_of_their_driver(llm: LLM) -> None:
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids_of(llm)] == [os.getpriority(os.PRIO_PROCESS, 0)] * 2
