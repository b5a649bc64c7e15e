"""Ranks as children of the coordinator's process: the same tokens as of one process, and none is left behind."""

from __future__ import annotations

import os
import signal

import pytest

from gapless import LLM, SamplingParams
from gapless.conf.errors import ConfigError
from gapless.conf.schema import HardwareConfig, ParallelConfig
from gapless.launch.process_launcher import ProcessLauncher
from tests.launch.test_failure import pids_of

PROMPTS = [[1, 2, 3], [4, 5, 6, 7] * 8]
PARAMS = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.mark.slow
def test_a_dead_rank_is_replaced_and_tokens_are_those_of_one_process() -> None:
    with LLM("tiny", **{"parallel.threads": 1}) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    found: dict[int, list[int]] = {}
    with LLM("tiny", pp=2, launcher="process", **{"parallel.threads": 1}) as llm:
        first = pids_of(llm)
        for number, output in enumerate(llm.stream(PROMPTS, PARAMS)):
            found[output.index] = output.outputs[0].token_ids
            if number == 100:
                os.kill(first[1], signal.SIGKILL)
        (fault,) = llm.record.faults
        last = pids_of(llm)
    assert [found[0], found[1]] == expected
    assert (fault.reason, fault.ranks) == ("process", [1])
    assert last[0] == first[0] != last[1] != first[1]
    for pid in {*first, *last}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_needs_ray_is_refused() -> None:
    for parallel, device, why in [
        (ParallelConfig(pp=2), "cuda", "parallel.launcher=process: supports CPUs only; use ray for hardware="),
        (
            ParallelConfig(pp=2, spares=1),
            "cpu",
            "parallel.spares=1: not supported by parallel.launcher=process; use ray",
        ),
    ]:
        with pytest.raises(ConfigError, match=why):
            ProcessLauncher().check(parallel, HardwareConfig(device=device))
    ProcessLauncher().check(ParallelConfig(pp=2), HardwareConfig())
