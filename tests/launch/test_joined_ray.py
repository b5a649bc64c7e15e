"""A Ray of the user's may end and start again: streams wait for it, and the line says which of its processes ended."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace

import pytest

from gapless import LLM
from gapless.launch.ray_launcher import RayLauncher
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.pipeline.protocol import PipelineError
from tests.launch.test_failure import pids_of
from tests.launch.test_recovery import LIMITS, check, expected, outputs_with
from tests.support.forked import finish
from tests.support.users_ray import UsersRay

__all__ = ["expected"]  # a fixture
GCS_PATIENCE_S = 16  # the half of it that is left must be enough to start a GCS, also beside other load
ENV = {"RAY_AUTH_MODE": "disabled", "RAY_gcs_rpc_server_reconnect_timeout_s": str(GCS_PATIENCE_S)}
DIED = r"rank \d \(stage \d\) died: Ray's (.+) ha(?:s|ve) died"
RAYLET = r"raylet of node [\d.]+"


def ended(text: str) -> str:
    found = re.fullmatch(DIED, text)
    assert found, text
    return found[1]


def lose(yours: UsersRay, expected: list[list[int]]) -> None:
    """Run the prompts, and have processes of a user's Ray end; run them again, and do not start it again."""

    def end_raylet() -> None:
        yours.lose("raylet")
        threading.Timer(2.0, yours.start).start()

    def end_gcs() -> None:
        yours.lose("gcs_server")
        time.sleep(GCS_PATIENCE_S / 2)  # until then it may come back
        threading.Timer(2.0, yours.start).start()

    gcs = rf"GCS at [\d.]+:{yours.address.split(':')[1]}"
    limits = {**LIMITS, "parallel.ray_address": yours.address}
    with LLM("tiny", pp=2, launcher=RayLauncher(), **limits) as llm:
        for number, (end, what) in enumerate(((end_raylet, RAYLET), (end_gcs, rf"(?:{RAYLET} and )?{gcs}"))):
            before = pids_of(llm)
            assert outputs_with(llm, [end]) == expected
            assert not set(before) & set(pids_of(llm))
            fault = llm.record.faults[number]
            assert len(llm.record.faults) == number + 1
            check(fault, "process", [0, 1])
            assert re.fullmatch(what, ended(fault.text))
            Ledger(llm.record).check()
        pipeline = llm._core.pipeline
        pipeline._parallel = replace(pipeline._parallel, start_timeout_s=1.0)
        line = rf"ranks? .+ did not recover \({DIED}\) within parallel\.start_timeout_s=1; raise it if .+"
        with pytest.raises(PipelineError) as failed:
            outputs_with(llm, [lambda: yours.lose("raylet")])
        assert re.fullmatch(line, str(failed.value)), failed.value


@pytest.mark.slow
def test_a_users_ray_is_waited_for(expected: list[list[int]]) -> None:
    with UsersRay(2, ENV) as yours:
        done = finish(lose, yours, expected, env=yours._env)
        assert done.returncode == 0, done.stderr
        assert re.search(rf"Ray's {RAYLET} has died; waiting for Ray to return at \S+, up to", done.stderr)
        assert "Raylet is terminated" not in done.stdout + done.stderr
