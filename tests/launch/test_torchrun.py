"""Ranks under torchrun: the same command line, the same tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from gapless import LLM
from gapless.conf.sampling import SamplingParams
from tests.support.processes import assert_gone, descendants_of
from tests.support.server import Server
from tests.support.tiers import HANGS_S

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
GENERATE = ["-m", "gapless.launch.torchrun", "generate", "model=shipped", "parallel.threads=1"]


def run(ranks: int, *overrides: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, "--nproc-per-node", str(ranks), *GENERATE, *overrides]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=HANGS_S)


PROMPT = "def read(self, size=-1):"


def tokens_over(ranks: int, grid: str, folder: Path) -> list[int]:
    """Return the tokens that ranks under torchrun give."""
    options = (f"parallel={grid}", f"prompt={PROMPT}", "sampling.max_tokens=12", "outputs=out.jsonl")
    done = run(ranks, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    tokens: list[int] = row["outputs"][0]["token_ids"]
    return tokens


@pytest.fixture(scope="module")
def of_one_rank() -> list[int]:
    with LLM("shipped", **{"parallel.threads": 1}) as llm:
        (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=12))
    return expected.outputs[0].token_ids


@pytest.fixture(scope="module")
def of_two_stages(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    return tokens_over(2, "pp2", tmp_path_factory.mktemp("torchrun"))


def test_tokens_of_two_stages_are_those_of_one_rank(of_two_stages: list[int], of_one_rank: list[int]) -> None:
    assert of_two_stages == of_one_rank


@pytest.mark.slow
def test_tokens_of_two_by_two_ranks_are_those_of_one(of_one_rank: list[int], tmp_path: Path) -> None:
    assert tokens_over(4, "tp2_pp2", tmp_path) == of_one_rank


@pytest.mark.slow
def test_a_wrong_number_of_ranks_is_one_line(tmp_path: Path) -> None:
    done = run(2, "parallel=tp2_pp2", "prompt=x", cwd=tmp_path)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("gapless: error: ")]
    assert lines == ["gapless: error: parallel.pp=2 x parallel.tp=2 is 4 ranks; torchrun started 2"]


def test_without_torchrun_it_says_how(tmp_path: Path) -> None:
    command = [sys.executable, *GENERATE, "prompt=x"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("gapless: error: start with `torchrun --nproc-per-node N")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "whom"), [(signal.SIGINT, "all"), (signal.SIGKILL, "agent"), (signal.SIGKILL, "driver")]
)
def test_nothing_is_left_behind(how: signal.Signals, whom: str, tmp_path: Path) -> None:
    command = [*TORCHRUN, "--nproc-per-node", "2", *GENERATE, "parallel=pp2", "prompt=x"]
    options = ["sampling.max_tokens=2000", "sampling.ignore_eos=true"]
    process = subprocess.Popen(
        [*command, *options], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    assert any("tok/s" in line for line in process.stderr)
    family = descendants_of(process.pid)
    if whom == "all":
        os.killpg(process.pid, how)
    else:
        ranks = [pid for pid in family if "RANK=0" in Path(f"/proc/{pid}/environ").read_text().split("\0")]
        os.kill(process.pid if whom == "agent" else min(ranks), how)
    assert_gone(family)
    process.communicate(timeout=HANGS_S)


@pytest.mark.slow
def test_killed_ranks_are_replaced(tmp_path: Path) -> None:
    limits = ["sampling.max_tokens=1800", "sampling.n=3", "sampling.ignore_eos=true", "outputs=out.jsonl"]
    command = [*TORCHRUN, "--nproc-per-node", "2", *GENERATE, "parallel=pp2", "prompt=x", *limits]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("tok/s" in line for line in process.stderr)
    serving = [pid for pid in descendants_of(process.pid) if is_serving(pid)]
    assert len(serving) == 2
    for pid in serving:
        os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    (row,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["faults"][-1]["ranks"] == [0, 1]  # one may be noticed before the other
    with LLM("shipped", **{"parallel.threads": 1}) as llm:
        (expected,) = llm.generate("x", SamplingParams(max_tokens=1800, n=3, ignore_eos=True))
    assert [output["token_ids"] for output in row["outputs"]] == [output.token_ids for output in expected.outputs]


def is_serving(pid: int) -> bool:
    """Whether a process is a rank with connections, rather than one that stands by."""
    is_rank = "GAPLESS_ROLE=rank" in Path(f"/proc/{pid}/environ").read_text().split("\0")
    return is_rank and any("socket:" in os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.slow
def test_a_server_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM, which torchrun passes to all ranks, lets a stream finish, though the first rank opened the store."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--local-addr", "127.0.0.1"]
    program = ["torch.distributed.run", *rendezvous, "--nproc-per-node", "2", "-m", "gapless.launch.torchrun"]
    server = Server(tmp_path, "parallel=pp2", "parallel.threads=1", program=program)
    try:
        server.until_ready()
        body = {"prompt": "import os\n", "max_tokens": 300, "ignore_eos": True, "stream": True}
        family = descendants_of(server.process.pid)
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert sum(line.startswith("data: {") for line in lines) == 299
        server.process.wait(HANGS_S)
        assert_gone(family)
    finally:
        server.process.kill()
        server.process.wait()
