"""Causes that were planted in real pipelines: the first sentence of the run names them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec
import pytest

from gapless.conf.build import to_mapping
from gapless.conf.policy_file import policy_config
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import BenchConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.engine.llm import LLM
from tests.support.process_launcher import ProcessLauncher
from tests.support.written_runs import analysed

LATE = """
import time
from gapless.runtime.scheduler import Scheduler

class Late(Scheduler):
    def fill(self, batch):
        self.take_decodes(batch, self.decode_share)
        self.take_prompts(batch, 64)
        if batch:
            time.sleep(0.04)
"""
SLOW = """
if rank == 1:
    import os, time
    from gapless.runtime.pipeline.stage_worker import StageWorker
    forward = StageWorker.forward
    def slow(self, *arguments):
        out = forward(self, *arguments)
        if os.path.exists({flag!r}):
            time.sleep(0.04)
        return out
    StageWorker.forward = slow
"""


class Pipeline:
    """A pipeline of two stages, the second of which is slow while `flag` exists."""

    def __init__(self, folder: Path) -> None:
        self.flag = folder / "slow"
        late = folder / "late.py"
        late.write_text(LATE)
        self.config = self.config_of()
        policy = policy_config(str(late))(name=late.name, file=str(late))  # type: ignore[call-arg]
        self.policies = {"sarathi": self.config.scheduler, "late": policy}
        self.launcher = ProcessLauncher(SLOW.format(flag=str(self.flag)))
        self.llm = LLM.from_config(
            replace(self.config, scheduler=self.policies["sarathi"]),
            policies=[self.policies["late"]],
            launcher=self.launcher,
        )

    @staticmethod
    def config_of(*overrides: str) -> BenchConfig:
        return compose_one(
            [
                "model=tiny",
                "parallel=pp2",
                "parallel.threads=1",
                "cache.num_blocks=600",
                "workload=fixed",
                "workload.num_prompts=12",
                "workload.input_len=100",
                "workload.output_len=12",
                *overrides,
            ],
            BenchConfig,
            "bench",
        )

    def words(self, policy: str = "sarathi", *overrides: str, slow: tuple[float, float] = (0.0, 0.0)) -> list[str]:
        """Run a workload; stage 1 is slow between these shares of its tokens."""
        workload, _ = requests(self.config_of(*overrides))
        self.llm.reset(self.policies[policy])
        tokens = sum(item.output_len for item in workload)
        for number, _ in enumerate(chain([None], self.llm.replay(workload))):
            if slow[0] <= number / tokens < slow[1]:
                self.flag.touch()
            else:
                self.flag.unlink(missing_ok=True)
        self.flag.unlink(missing_ok=True)
        return self.words_of_record()

    def words_of_record(self, *, shares_cores: bool = False) -> list[str]:
        """Return the words of the last run; as if no rank had waited for a processor, unless it `shares_cores`.

        Other tests run beside this one.
        """
        record = self.llm.record
        if not shares_cores:
            alone = [msgspec.structs.replace(span, contended_before=0.0, contended=0.0) for span in record.spans]
            record = replace(record, spans=alone)
        return analysed(record, to_mapping(self.config)).words


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path_factory.mktemp("planted"))
    with made.llm:
        yield made


def test_a_slow_stage(pipeline: Pipeline) -> None:
    words = pipeline.words("sarathi", "workload.output_len=40", slow=(0.0, 2.0))
    assert words[0].startswith("A slow stage 1 ("), words


@pytest.mark.slow
@pytest.mark.parametrize("slow", [(0.3, 0.5), (0.2, 0.8)])
def test_a_stage_that_is_slow_for_a_while(pipeline: Pipeline, slow: tuple[float, float]) -> None:
    words = pipeline.words("sarathi", "workload.num_prompts=8", "workload.output_len=120", slow=slow)
    named = r"A straggler on stage 1 \([\d.]+x its usual time from [\d.]+ s to [\d.]+ s\) "
    assert re.match(named, words[0]), words


def test_a_late_coordinator(pipeline: Pipeline) -> None:
    words = pipeline.words("late")
    assert words[0].startswith("Coordinator overhead costs "), words


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count waits for a processor")
def test_hogs_on_the_cores_of_the_ranks(pipeline: Pipeline) -> None:
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        pipeline.words()
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    words = pipeline.words_of_record(shares_cores=True)
    assert re.match(r"CPU contention (on stage \d )?costs ", words[0]), words  # that of one stage, by chance


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count waits for a processor")
def test_a_hog_on_one_core(pipeline: Pipeline) -> None:
    """Stage 1 is bound to the core that another process keeps busy; stage 0 is not."""
    every = os.sched_getaffinity(0)
    core = {max(every)}
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    bind(hog.pid, core)
    bind(pipeline.launcher.ranks[1].pid, core)
    try:
        pipeline.words("sarathi", "workload.output_len=60")
    finally:
        hog.kill()
        hog.wait()
        bind(pipeline.launcher.ranks[1].pid, every)
    words = pipeline.words_of_record(shares_cores=True)
    assert re.match("CPU contention (on stage 1 )?costs ", words[0]), words  # stage 0 too, if others run beside


def bind(process: int, cores: set[int]) -> None:
    """Bind all threads of a process to cores."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def test_a_slow_client(pipeline: Pipeline) -> None:
    """It asks for the next answer a while after the last one."""
    pipeline.llm.reset(pipeline.policies["sarathi"])
    for number in range(16):
        time.sleep(0.1)
        pipeline.llm.generate([[number + 1] * 20], SamplingParams(max_tokens=2))
    words = pipeline.words_of_record()
    assert re.match("No cause worth fixing: .*; the rest is mostly time without requests ", words[0]), words


def test_a_starved_queue(pipeline: Pipeline) -> None:
    words = pipeline.words("sarathi", "workload.request_rate=6", "workload.output_len=2")
    assert re.match("No cause worth fixing: .*; the rest is mostly time without requests ", words[0]), words
