"""The walk-through over two hosts gives the commands that `benchmarks.two_hosts` runs."""

from __future__ import annotations

import re

import pytest

from benchmarks import two_hosts
from benchmarks.support.results import ROOT

PAGE = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")


def commands(heading: str) -> list[str]:
    """Return the shell blocks of a section of docs/cluster.md."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [block.replace("\\\n", " ") for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL)]


def test_each_host_of_a_ray_cluster_is_started_with_the_token() -> None:
    first, second, run = commands("Two hosts, from start to tokens")
    for block in (first, second):
        for name, value in two_hosts._TOKEN.items():
            assert f"export {name}={value}\n" in block
        assert re.search(r"^ray start .*--node-ip-address=10\.0\.0\.[12]$", block, re.MULTILINE)
    assert f"--address=10.0.0.1:{two_hosts.GCS_PORT} " in second
    assert {"parallel=pp2", "parallel.host=10.0.0.1"} <= {*run.split()}


def test_torchrun_is_started_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(two_hosts, "within", lambda space, command, log, environment: started.append([*command]))
    monkeypatch.setattr(two_hosts, "HOSTS", ("10.0.0.1", "10.0.0.2"))
    monkeypatch.setattr(two_hosts, "TORCHRUN_PORT", 29500)
    two_hosts.start_torchrun(["a", "b"], ROOT, "out")
    (block,) = (block for block in commands("torchrun") if "--nnodes" in block)
    told = block.split()
    for rank, words in enumerate(started):
        own = told[1 : told.index("gapless.launch.torchrun") + 1]
        own[own.index("--node-rank") + 1] = str(rank)
        at = words.index("--nnodes")
        assert words[at : at + len(own)] == own
        assert {"parallel=pp2", "parallel.host=10.0.0.1"} <= {*words}
