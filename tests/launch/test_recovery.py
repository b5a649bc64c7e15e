"""A fault of a real pipeline is a pause: what died is started again, and every output is that of a run without it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.support.faults import cut_among, kill, stop
from gapless import LLM
from gapless.conf.clusters import ClusterConfig
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import HardwareConfig, ParallelConfig
from gapless.launch.ray_launcher import RayLauncher
from gapless.parallel.control import ControlClient, Endpoint
from gapless.parallel.frames import ConnectionLost
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.core.run_record import FaultRecord
from gapless.runtime.pipeline.protocol import PipelineError
from tests.launch.test_failure import pids_of
from tests.support.forked import finish
from tests.support.process_launcher import ProcessLauncher
from tests.support.processes import descendants_of, program_of
from tests.support.strangers import Strangers
from tests.support.tiers import HANGS_S

PROMPTS = [[1, 2, 3], [4, 5, 6, 7] * 8, [9] * 40, [11, 12]]
PARAMS = [
    SamplingParams(max_tokens=300, ignore_eos=True),
    SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.9, seed=7),
    SamplingParams(max_tokens=250, ignore_eos=True, temperature=0.7, repetition_penalty=1.2, seed=8),
    SamplingParams(max_tokens=300, ignore_eos=True),
]
LIMITS = {"parallel.threads": 1, "parallel.step_timeout_s": 4.0}
RAISES = """
import signal
def fail(*_):
    raise MemoryError("CUDA out of memory")
signal.signal(signal.SIGUSR1, fail)
"""

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM("tiny", **{"parallel.threads": 1}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def outputs_with(llm: LLM, faults: list[Callable[[], object]]) -> list[list[int]]:
    """Run the prompts, with a fault after each 60 outputs; return the tokens as they came."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    for number, output in enumerate(llm.stream(PROMPTS, PARAMS)):
        tokens, known = output.outputs[0].token_ids, found[output.index]
        assert tokens[: len(known)] == known, "a token that was sent has changed"
        found[output.index] = tokens
        if number % 60 == 59 and faults:
            faults.pop(0)()
    assert not faults
    return found


def check(fault: FaultRecord, reason: str, ranks: list[int]) -> None:
    assert (fault.reason, fault.ranks) == (reason, ranks), fault
    assert list(fault.parts) == ["stop", "start", "rendezvous", "weights"]
    assert fault.up is not None
    assert fault.since <= fault.detected <= fault.up
    assert sum(fault.parts.values()) == pytest.approx(fault.up - fault.detected, abs=1e-6)
    assert fault.requests == len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 2)])
def test_killed_ranks_are_replaced_and_nothing_is_lost(
    ray_launcher: RayLauncher, expected: list[list[int]], pp: int, tp: int
) -> None:
    with LLM("tiny", pp=pp, tp=tp, launcher=ray_launcher, **LIMITS) as llm:
        before, last = pids_of(llm), pp * tp - 1
        assert outputs_with(llm, [lambda: kill(pids_of(llm)[0]), lambda: kill(pids_of(llm)[last])]) == expected
        after = pids_of(llm)
        assert [rank for rank in range(pp * tp) if before[rank] != after[rank]] == [0, last]
        first, second = llm.record.faults
        check(first, "process", [0])
        check(second, "process", [last])
        Ledger(llm.record).check()


def lose(name: str, expected: list[list[int]]) -> None:
    """Run the prompts on a Ray of this process's own, one of whose processes ends, and check all."""
    with LLM("tiny", pp=2, launcher=RayLauncher(), **LIMITS) as llm:
        before = pids_of(llm)

        def end() -> None:
            (victim,) = [pid for pid in descendants_of(os.getpid()) if program_of(pid) == name]
            kill(victim)

        assert outputs_with(llm, [end]) == expected
        assert not set(before) & set(pids_of(llm))
        (fault,) = llm.record.faults
        check(fault, "process", [0, 1])
        assert "on this machine has died: killed by SIGKILL" in fault.text
        Ledger(llm.record).check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_ray_that_was_started_here_is_started_anew(name: str, expected: list[list[int]]) -> None:
    done = finish(lose, name, expected)
    assert done.returncode == 0, done.stderr


@contextmanager
def stages(**limits: object) -> Iterator[tuple[LLM, ProcessLauncher]]:
    launcher = ProcessLauncher(RAISES)
    with LLM("tiny", pp=2, launcher=launcher, **LIMITS, **limits) as llm:
        yield llm, launcher


@pytest.fixture(scope="module")
def two_stages() -> Iterator[tuple[LLM, ProcessLauncher]]:
    with stages(**{"parallel.max_recoveries": 20}) as found:
        yield found


@pytest.mark.slow
def test_what_hangs_raises_or_is_cut_off_recovers_too(
    two_stages: tuple[LLM, ProcessLauncher], expected: list[list[int]]
) -> None:
    llm, launcher = two_stages

    def fail() -> None:
        os.kill(launcher.ranks[0].pid, signal.SIGUSR1)

    def cut() -> None:
        assert cut_among(pids_of(llm)) > 0

    before = pids_of(llm)
    assert outputs_with(llm, [cut, lambda: stop(pids_of(llm)[1]), fail]) == expected
    connection, hang, error = llm.record.faults
    check(connection, "connection", [])
    check(hang, "hang", [1])
    check(error, "error", [0])
    assert error.text == "rank 0 (stage 0) failed: MemoryError: CUDA out of memory"
    assert not set(before) & set(pids_of(llm))
    Ledger(llm.record).check()


@pytest.mark.slow
def test_faults_come_during_a_repair(two_stages: tuple[LLM, ProcessLauncher], expected: list[list[int]]) -> None:
    llm, launcher = two_stages

    def again() -> None:
        """Kill the one, and its successor and the other one while they join."""
        kill(launcher.ranks[0].pid)
        for seconds, rank in ((0.7, 0), (2.5, 1)):
            threading.Timer(seconds, lambda rank=rank: launcher.ranks[rank].kill()).start()

    assert outputs_with(llm, [again, lambda: time.sleep(3)]) == expected
    assert len(llm.record.faults) >= 2
    assert all(fault.up is not None for fault in llm.record.faults)
    Ledger(llm.record).check()


@pytest.mark.slow
def test_a_fault_while_nothing_runs_is_repaired_by_the_next_call(
    two_stages: tuple[LLM, ProcessLauncher], expected: list[list[int]]
) -> None:
    llm, launcher = two_stages
    kill(launcher.ranks[1].pid)
    launcher.ranks[1].wait()
    assert outputs_with(llm, []) == expected


@pytest.mark.slow
def test_a_program_has_its_own_way_with_what_is_logged_of_a_fault(
    two_stages: tuple[LLM, ProcessLauncher],
    expected: list[list[int]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    llm, _ = two_stages
    handler = logging.FileHandler(tmp_path / "log")
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("gapless.runtime")
    llm.reset()

    def cut() -> None:
        cut_among(pids_of(llm))

    logger.addHandler(handler)
    try:
        assert outputs_with(llm, [cut]) == expected
        fault, repair = (tmp_path / "log").read_text().splitlines()
        logger.setLevel(logging.CRITICAL)
        assert outputs_with(llm, [cut]) == expected
        assert len((tmp_path / "log").read_text().splitlines()) == 2
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)
        handler.close()
    assert fault.startswith("WARNING gapless.runtime.engine.llm rank ")
    assert fault.endswith("; the pipeline is recovering, 4 requests waiting")
    assert repair.startswith("WARNING gapless.runtime.engine.llm the pipeline has recovered, ")
    assert len(llm.record.faults) == 2
    assert capfd.readouterr() == ("", "")


class CrowdedLauncher(ProcessLauncher):
    """Has ranks come late in the place of others, behind strangers and ranks that do not belong there."""

    def __init__(self, strangers: ExitStack) -> None:
        super().__init__()
        self._strangers = strangers
        self.endpoint: Endpoint | None = None
        self.refused: list[str] = []

    def start(
        self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig, cluster: ClusterConfig
    ) -> None:
        self.endpoint = endpoint
        super().start(endpoint, parallel, hardware, cluster)

    def replace(self, ranks: Collection[int], endpoint: Endpoint) -> None:
        self._strangers.enter_context(Strangers(endpoint, 60))
        (other,) = {0, 1} - set(ranks)
        impostors = {
            "of another run": (replace(endpoint, secret="another run's"), min(ranks)),
            "not awaited": (endpoint, other),
            "beyond the world": (endpoint, 7),
        }
        for name, impostor in impostors.items():
            threading.Thread(target=self._join, args=(name, *impostor), daemon=True).start()
        time.sleep(1.0)
        super().replace(ranks, endpoint)

    def _join(self, name: str, endpoint: Endpoint, rank: int) -> None:
        try:
            ControlClient(endpoint, rank, 20.0)
        except (ConnectionLost, OSError):
            self.refused.append(name)


@pytest.mark.slow
def test_nobody_at_the_control_port_stops_a_repair(expected: list[list[int]]) -> None:
    with ExitStack() as strangers:
        launcher = CrowdedLauncher(strangers)
        with LLM("tiny", pp=2, launcher=launcher, **LIMITS) as llm:

            def fault() -> None:
                assert launcher.endpoint is not None
                with pytest.raises(ConnectionRefusedError):  # while all ranks are there, nobody listens
                    socket.create_connection((launcher.endpoint.host, launcher.endpoint.port))
                kill(launcher.ranks[1].pid)

            assert outputs_with(llm, [fault]) == expected
            (found,) = llm.record.faults
            check(found, "process", [1])
    assert sorted(launcher.refused) == ["beyond the world", "not awaited", "of another run"]


class CrampedLauncher(ProcessLauncher):
    """Has no place for a rank that has ended."""

    def replace(self, ranks: Collection[int], endpoint: Endpoint) -> None:
        for rank in ranks:
            self._end(rank)
            del self.ranks[rank]

    def unplaced(self) -> set[int]:
        return self.expected - self.ranks.keys()

    def start(
        self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig, cluster: ClusterConfig
    ) -> None:
        self.expected = set(range(parallel.world_size))
        super().start(endpoint, parallel, hardware, cluster)

    def keep(self, ranks: Sequence[int], endpoint: Endpoint, parallel: ParallelConfig) -> None:
        for rank in list(self.ranks):
            self.ranks[rank].wait(HANGS_S)  # it is asked to end
        self.ranks.clear()
        self.start(endpoint, parallel, HardwareConfig(), ClusterConfig())


@pytest.mark.slow
def test_the_layers_of_a_lost_stage_go_to_the_others_while_they_fit(
    expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    launcher = CrampedLauncher()
    room = {"parallel.resplit_after_s": 0.5, "hardware.memory_gib": 0.002, "cache.num_blocks": 128}
    with LLM("tiny", pp=3, launcher=launcher, **LIMITS, **room) as llm:
        assert outputs_with(llm, [lambda: kill(launcher.ranks[1].pid)]) == expected
        (fault,) = llm.record.faults
        assert (fault.stages, fault.ranks, len(llm.where)) == (2, [0, 1], 2)
        warning = "no room for rank 1 for 0.5 s (parallel.resplit_after_s): continuing with 2 stages"
        assert warning in caplog.text
        ledger = Ledger(llm.record)
        ledger.check()
        assert ledger.busy_seconds(2) > 0
        llm.reset()
        text = r"no room for rank 1 \(stage 1\), and the model does not fit into fewer stages: .*memory"
        with pytest.raises(PipelineError, match=text):
            outputs_with(llm, [lambda: kill(launcher.ranks[1].pid)])


@pytest.mark.slow
def test_too_many_faults_end_the_run() -> None:
    with stages(**{"parallel.max_recoveries": 1}) as (llm, launcher):
        text = r"^rank 0 \(stage 0\) died.*; fault 2 within 600 s \(parallel\.max_recoveries=1\)$"
        with pytest.raises(PipelineError, match=text):
            outputs_with(llm, [lambda: kill(launcher.ranks[0].pid)] * 2)


@pytest.mark.slow
def test_a_spare_stands_in(ray_launcher: RayLauncher, expected: list[list[int]]) -> None:
    with LLM("tiny", pp=2, launcher=ray_launcher, **LIMITS, **{"parallel.spares": 1}) as llm:
        assert outputs_with(llm, [lambda: kill(pids_of(llm)[1])]) == expected
        (fault,) = llm.record.faults
        check(fault, "process", [1])
        started = Path(f"/proc/{pids_of(llm)[1]}/stat").read_text().rsplit(")", 1)[1].split()[19]
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        age = uptime - int(started) / os.sysconf("SC_CLK_TCK")
        assert age > time.monotonic() - fault.since, "it was there before the fault"


LOSES_A_NODE = r"""
import re, time
from ray.cluster_utils import Cluster
from gapless import LLM, SamplingParams
from tests.support.processes import is_alive

soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_timeout_ms": 500,
        "health_check_failure_threshold": 2}
cluster = Cluster(initialize_head=True,
                  head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": soon})
for _ in range(3):
    cluster.add_node(num_cpus=1)

def end_the_node_of(rank, llm):
    pid = re.search(r"pid (\d+)", llm.where[rank])[1]
    raylet = int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])
    (node,) = [node for node in cluster.worker_nodes if raylet in {p.process.pid for p in node.all_processes["raylet"]}]
    cluster.remove_node(node, allow_graceful=False)
    while is_alive(int(pid)):  # or the run might be over before the rank is
        time.sleep(0.01)

params = SamplingParams(max_tokens=200, ignore_eos=True)
with LLM("tiny", **{"parallel.threads": 1}) as llm:
    (expected,) = llm.generate([[1, 2, 3]], params)
overrides = {"parallel.threads": 1, "parallel.ray_address": cluster.address, "parallel.resplit_after_s": 1.0,
             "parallel.start_timeout_s": 300}
with LLM("tiny", pp=2, **overrides) as llm:
    for number, output in enumerate(llm.stream([[1, 2, 3]], params)):
        if number == 50:
            end_the_node_of(1, llm)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.record.faults[-1].ranks == [1]
    kept = llm.where[1]
    for number, output in enumerate(llm.stream([[1, 2, 3]], params)):
        if number == 50:
            end_the_node_of(0, llm)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert llm.record.faults[-1].stages == 1
    assert llm.where == [kept]  # the process that is left has all layers now
cluster.shutdown()
print("all tokens are there")
"""


@pytest.mark.slow
def test_a_rank_whose_node_is_lost_starts_on_another_or_leaves_its_layers_to_the_rest() -> None:
    command = [sys.executable, "-c", LOSES_A_NODE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert "all tokens are there" in done.stdout, done.stderr[-3000:]
