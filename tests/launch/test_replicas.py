"""Several pipelines behind one front: real engines, one of which dies."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from gapless.conf.errors import ConfigError
from gapless.conf.schema import ServeConfig
from gapless.kernels import cores
from gapless.launch import compose
from gapless.launch.server.replica_share import check_replicas, share_of
from tests.support.processes import assert_gone, descendants_of
from tests.support.server import Server, serving
from tests.support.tiers import HANGS_S

LONG = {"prompt": "import os\n", "max_tokens": 900, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "import os\n", "max_tokens": 12, "temperature": 0}


def config_of(*overrides: str) -> ServeConfig:
    return compose.compose_one(overrides, ServeConfig, "serve")


def until_all_are_ready(server: Server) -> None:
    server.until(lambda: httpx2.get(f"{server.url}/health").json()["reason"] == "requests are accepted")


def by_replica(server: Server, name: str) -> dict[str, float]:
    text = httpx2.get(f"{server.url}/metrics").text
    rows = re.findall(rf'^gapless:{name}\{{.*?replica="(\d+)".*\}} (\S+)$', text, re.MULTILINE)
    return {replica: float(value) for replica, value in rows}


@pytest.mark.slow
def test_two_replicas_share_requests_and_one_goes_on_alone(tmp_path: Path) -> None:
    """Four streams spread over two engines. The streams of the one that dies end with an error; the others go on."""
    with serving(tmp_path, "serve.replicas=2", "parallel.threads=1") as server, ExitStack() as streams:
        until_all_are_ready(server)
        lines: list[Iterator[str]] = []
        for _ in range(4):
            post = httpx2.stream("POST", f"{server.url}/v1/completions", json=LONG)
            lines.append(streams.enter_context(post).iter_lines())
            next(lines[-1])
        server.until(lambda: by_replica(server, "num_requests_running") == {"0": 2, "1": 2})
        assert by_replica(server, "replica_ready") == {"0": 1, "1": 1}
        first, second = server.engines
        os.kill(first, signal.SIGKILL)
        ends = [[line for line in each if line][-2:] for each in lines]
        errors = ["error" in json.loads(last.removeprefix("data: ")) for last, _ in ends]
        assert sorted(errors) == [False, False, True, True]
        assert all(done == "data: [DONE]" for _, done in ends)
        health = httpx2.get(f"{server.url}/health")
        assert health.status_code == 200
        words = "1 of 2 replicas failed: the engine process died; 1 of 2 accept requests"
        assert health.json() == {"status": "ready", "reason": words}
        assert sorted(by_replica(server, "replica_ready").values()) == [0, 1]
        for _ in range(3):
            assert httpx2.post(f"{server.url}/v1/completions", json=SHORT).status_code == 200
        os.kill(second, signal.SIGKILL)
        assert server.process.wait(HANGS_S) == 1
        assert "2 of 2 replicas failed" in server.log


@pytest.mark.slow
def test_a_drain_lets_every_replica_finish(tmp_path: Path) -> None:
    """The same prompt has the same tokens on both; SIGTERM ends both engines once their requests are done."""
    with serving(tmp_path, "serve.replicas=2", "parallel.threads=1") as server, ExitStack() as streams:
        until_all_are_ready(server)
        answers = [httpx2.post(f"{server.url}/v1/completions", json=SHORT).json() for _ in range(2)]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]
        server.until(lambda: len([s for s in by_replica(server, "stage_busy_seconds_total").values() if s > 0]) == 2)
        lines = []
        for _ in range(2):
            post = httpx2.stream("POST", f"{server.url}/v1/completions", json=LONG | {"max_tokens": 300})
            lines.append(streams.enter_context(post).iter_lines())
            next(lines[-1])
        children = descendants_of(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert [sum(line.startswith("data: {") for line in each) for each in lines] == [299, 299]
        assert server.process.wait(HANGS_S) == 0
        assert_gone(children)


def test_replicas_share_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    two_of_two = config_of("serve.replicas=2", "parallel=pp2")
    assert share_of(two_of_two, 1)[0].parallel.threads == cores.threads(4) == cores.find().count // 4
    assert share_of(config_of("serve.replicas=2", "parallel.threads=7"), 0)[0].parallel.threads == 7
    assert share_of(config_of("parallel=pp2"), 0)[0].parallel.threads is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    on_gpus = config_of("serve.replicas=2", "parallel=pp2", "hardware=a100-80g")
    check_replicas(on_gpus)
    assert [share_of(on_gpus, n)[1] for n in (0, 1)] == [{"CUDA_VISIBLE_DEVICES": d} for d in ("4,5", "6,7")]
    with pytest.raises(ConfigError, match=r"serve.replicas=3: .* need 6, .* shows 4; must be 2 at most"):
        check_replicas(config_of("serve.replicas=3", "parallel=pp2", "hardware=a100-80g"))
    cluster = config_of("serve.replicas=3", "parallel=pp2", "hardware=a100-80g", "parallel.ray_address=auto")
    check_replicas(cluster)
    assert share_of(cluster, 2) == (cluster, {})


def test_torchrun_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"serve.replicas=2: torchrun starts the ranks of one pipeline; must be 1"):
        check_replicas(config_of("serve.replicas=2", "parallel=pp2", "parallel.launcher=torchrun"))
