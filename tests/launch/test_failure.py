"""A rank that dies, hangs or fails to start ends the run with its own error, where faults are not repaired.

Nothing stays behind, nor after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gapless import LLM
from gapless.conf.build import compose_engine, load_group
from gapless.conf.sampling import SamplingParams
from gapless.launch.ray_launcher import RayLauncher
from gapless.runtime.pipeline.protocol import PipelineError
from tests.support.process_launcher import ProcessLauncher
from tests.support.processes import assert_gone, descendants_of, program_of
from tests.support.tiers import HANGS_S, first_quick

LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


def pids_of(llm: LLM) -> list[int]:
    return [int(re.search(r"pid (\d+)", where)[1]) for where in llm.where]


@pytest.fixture
def llm(ray_launcher: RayLauncher) -> Iterator[LLM]:
    overrides = {"parallel.threads": 1, "parallel.step_timeout_s": 4.0, "parallel.max_recoveries": 0}
    with LLM("tiny", pp=2, launcher=ray_launcher, **overrides) as llm:
        yield llm


@pytest.mark.parametrize("rank", first_quick([1, 0]))
def test_a_killed_rank_ends_the_run(llm: LLM, rank: int) -> None:
    pids = pids_of(llm)
    outputs = llm.stream([[1, 2, 3]] * 3, LONG)
    next(outputs)
    os.kill(pids[rank], signal.SIGKILL)
    with pytest.raises(PipelineError, match=rf"rank {rank} \(stage {rank}\) died"):
        list(outputs)
    llm.close()
    assert_gone(pids)


@pytest.mark.slow
def test_a_hung_stage_is_named(llm: LLM) -> None:
    pids = pids_of(llm)
    outputs = llm.stream([[1, 2, 3]] * 3, LONG)
    next(outputs)
    os.kill(pids[1], signal.SIGSTOP)
    error = (
        rf"^stage 1 hangs \(rank 1 without an answer, .* pid {pids[1]} .*no progress within parallel\.step_timeout_s=4"
    )
    with pytest.raises(PipelineError, match=error):
        list(outputs)
    llm.close()
    assert_gone(pids)


@pytest.mark.slow
def test_a_start_is_bounded_by_its_own_limit_alone(ray_launcher: RayLauncher) -> None:
    with LLM("tiny", pp=2, launcher=ray_launcher) as llm:
        pid = pids_of(llm)[1]

    def start(pause_s: float, **limits: float) -> LLM:
        """Start with a rank that pauses before it connects to the other."""

        def pause(text: str) -> None:
            if text == "ranks load their shards":
                os.kill(pid, signal.SIGSTOP)
                Timer(pause_s, os.kill, (pid, signal.SIGCONT)).start()

        overrides = {"parallel.threads": 1} | {f"parallel.{key}": value for key, value in limits.items()}
        config = compose_engine(
            model="tiny", pp=2, tp=1, scheduler="sarathi", launcher="ray", hardware="cpu", overrides=overrides
        )
        return LLM.from_config(config, launcher=ray_launcher, on_progress=pause)

    with start(4, step_timeout_s=1.0) as llm:
        assert llm.generate([[1, 2, 3]])
    with pytest.raises(
        PipelineError, match=r"rank 1 \(stage 1\).* did not .*within parallel\.start_timeout_s=2; raise it"
    ):
        start(6, start_timeout_s=2.0)


@pytest.mark.slow
def test_a_rank_that_fails_to_start_has_the_last_word(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resources.files("gapless.models") / "shipped", folder)

    class LosesTheFolder(RayLauncher):
        def start(self, *args: Any) -> None:
            shutil.rmtree(folder)
            super().start(*args)

    with pytest.raises(PipelineError, match=r"rank \d \(stage \d\) failed: ConfigError: .*no such folder"):
        LLM(folder, pp=2, launcher=LosesTheFolder())


NODES = """
import os, socket
from gapless.parallel import control
control.boot_id = socket.gethostname = lambda: f"node-{{rank}}"
if rank == 1:
    os.environ.update(CXX="/nowhere/c++", XDG_CACHE_HOME={cache!r})
"""


@pytest.mark.slow
def test_several_nodes_of_a_stage_and_a_lack_of_cpp_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM("tiny", tp=2, launcher=ProcessLauncher(NODES.format(cache=str(tmp_path)))) as llm:
        assert llm.generate([[1, 2, 3]])
    assert "stages span several nodes (stage 0 on node-0, node-1), so" in caplog.text
    rate = r"\(expect about [\d.]+ tokens/s for a single request\)"
    line = rf"using torch's operators on rank 1, which are slower {rate}: "
    assert re.search(rf"{line}\[Errno 2\] No such file or directory: '/nowhere/c\+\+'; install a wheel", caplog.text)


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


COMMON = ["model=tiny", "parallel=pp2", "parallel.threads=1"]
GENERATE = ["generate", *COMMON, "prompts=prompts.jsonl"]
BENCH = [
    "bench",
    *COMMON,
    "workload.input_len=8",
    "workload.output_len=2000",
    "workload.num_prompts=40",
    "warmup=false",
]
PROMPTS = '{"prompt": "abc", "max_tokens": 1}\n' + 40 * '{"prompt": "abc", "max_tokens": 2000, "ignore_eos": true}\n'


@contextmanager
def command(
    cwd: Path, arguments: list[str], until: str = "tok/s", **env: str
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Run a command until it prints `until`; yield it, and the folder that is its Ray's temporary directory."""
    (cwd / "prompts.jsonl").write_text(PROMPTS)
    with TemporaryDirectory(prefix="t", dir="/tmp") as temporary:  # sockets need a short path
        driver = subprocess.Popen(
            [sys.executable, "-m", "gapless.launch.cli", *arguments],
            cwd=cwd,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | env | {"RAY_TMPDIR": temporary},
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # `nohup` of the tests ignores it
        )
        try:
            assert driver.stderr is not None
            seen = []
            for line in driver.stderr:
                seen.append(line)
                if until in line:
                    break
            else:
                pytest.fail("".join(seen))
            yield driver, Path(temporary)
        finally:
            if driver.poll() is None:
                driver.kill()
            driver.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "arguments", "word"),
    [
        (signal.SIGKILL, GENERATE, None),
        (signal.SIGINT, GENERATE, "interrupted"),
        (signal.SIGTERM, BENCH, "terminated"),
    ],
)
def test_nothing_outlives_the_driver(
    how: signal.Signals, arguments: list[str], word: str | None, tmp_path: Path
) -> None:
    with command(tmp_path, arguments) as (driver, temporary):
        family = descendants_of(driver.pid)
        assert len(family) >= 4
        assert list(temporary.iterdir())
        if how is not signal.SIGKILL:  # a terminal and `timeout` send it to the whole process group
            os.killpg(driver.pid, how)
        else:
            os.kill(driver.pid, how)
        if word is None:
            driver.wait(timeout=HANGS_S)
            assert_gone(family)
        _, stderr = driver.communicate(timeout=HANGS_S)
        assert_gone(family)
        assert list(temporary.iterdir()) == []
    if word is None:
        return
    assert driver.returncode == 128 + how
    assert stderr.splitlines()[-1] == f"gapless: {word}"
    assert "Traceback" not in stderr
    assert len(list(tmp_path.glob("runs/*/report.html"))) == 1
    if arguments is GENERATE:
        (outputs,) = tmp_path.glob("runs/*/outputs.jsonl")
        assert [json.loads(line)["index"] for line in outputs.read_text().splitlines()] == [0]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "word"), [(signal.SIGTERM, "terminated"), (signal.SIGINT, "interrupted")])
def test_a_signal_while_ray_starts_ends_the_run(how: signal.Signals, word: str, tmp_path: Path) -> None:
    with command(tmp_path, GENERATE, until="starting tiny") as (driver, temporary):
        deadline = time.monotonic() + HANGS_S
        while not any(program_of(pid) == "gcs_server" for pid in descendants_of(driver.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = descendants_of(driver.pid)
        os.killpg(driver.pid, how)
        _, stderr = driver.communicate(timeout=HANGS_S)
        assert_gone(family)
        assert list(temporary.iterdir()) == []
    assert driver.returncode == 128 + how
    assert stderr.splitlines()[-1] == f"gapless: {word}"
    assert "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "of", "grid"), [("gcs_server", "GCS", "parallel=pp2"), ("raylet", "raylet", "parallel=tp2_pp2")]
)
def test_a_dead_ray_that_may_not_be_repaired_is_named(name: str, of: str, grid: str, tmp_path: Path) -> None:
    with command(tmp_path, [*BENCH, grid, "parallel.max_recoveries=0"]) as (driver, temporary):
        family = descendants_of(driver.pid)
        (victim,) = [pid for pid in family if program_of(pid) == name]
        os.kill(victim, signal.SIGKILL)
        _, stderr = driver.communicate(timeout=HANGS_S)
        assert re.fullmatch(
            rf"gapless: error: rank \d \(stage \d\) died: Ray's {of} \(pid {victim}\) on this machine has died: "
            "killed by SIGKILL",
            stderr.splitlines()[-1],
        )
        assert driver.returncode == 1
        assert_gone(family)
        assert list(temporary.iterdir()) == []


def test_too_many_ranks_for_the_cluster_is_one_line(ray_launcher: RayLauncher) -> None:
    with pytest.raises(ValueError, match=r"parallel\.pp=2: each stage needs a node with 1 CPU and 1 GPU"):
        LLM("tiny", pp=2, launcher=RayLauncher(), hardware="a100-80g")
    assert load_group("hardware", "a100-80g")["device"] == "cuda"


def test_ranks_run_at_the_priority_of_their_driver(llm: LLM) -> None:
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids_of(llm)] == [os.getpriority(os.PRIO_PROCESS, 0)] * 2
