"""What the front says while a failed pipeline is repaired, or a stage is slow: health, metrics, the live page."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import msgspec
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from gapless.conf.schema import ServeConfig
from gapless.launch.compose import compose_one
from gapless.launch.server.app import make_app
from gapless.launch.server.compiler import Compiler
from gapless.launch.server.engine_client import EngineClient
from gapless.launch.server.keys import Keys
from gapless.launch.server.monitor.live import Live
from gapless.launch.server.monitor.monitor import Monitor, idle_by_cause
from gapless.launch.server.prometheus import Metrics
from gapless.launch.server.replica_set import ReplicaSet
from gapless.launch.server.service import Service
from gapless.runtime.analysis.ledger.causes import CAUSES, Cause
from gapless.runtime.analysis.live.idle_now import idle_at
from gapless.runtime.core.compute_share import ComputeShare
from gapless.runtime.core.run_record import FaultReason, FaultRecord
from gapless.runtime.engine.intake import Intake
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.serving.messages import (
    TOKEN_BOUNDS,
    Failed,
    FromEngine,
    Recovery,
    Slow,
    Snapshot,
    Started,
    encoder,
)
from tests.support.browser import CHROMIUM, DRIVER, browsing
from tests.support.tiers import HANGS_S

STAGES = 2


def snapshot(*faults: FaultRecord, ended: float, is_idle: bool = False) -> Snapshot:
    """Return the state of an engine whose stages computed last at `ended`."""
    idle = [[0.0] * len(CAUSES) for _ in range(STAGES)]
    return Snapshot(
        ended,
        3,
        1,
        50,
        False,
        0,
        0,
        0,
        is_idle,
        Recovery.of(faults),
        by_tokens=[0] * (len(TOKEN_BOUNDS) + 1),
        busy=[1.0] * STAGES,
        idle=idle,
        ends=[ended] * STAGES,
    )


def fault(since: float, up: float | None, reason: FaultReason = "process", epoch: int = 1) -> FaultRecord:
    parts = {} if up is None else {"start": 2.0, "weights": 1.0}
    return FaultRecord(epoch, reason, "rank 1 ended with signal 9", since, since + 0.5, up, parts, [1], 4, 99)


@dataclass
class Front:
    """The HTTP front with an engine that only sends what a test says."""

    url: str
    client: EngineClient
    metrics: Metrics
    said: list[tuple[int, str]]
    loop: asyncio.AbstractEventLoop

    def tell(self, message: FromEngine) -> None:
        async def receive() -> None:
            self.client.receive(encoder.encode(message))

        asyncio.run_coroutine_threadsafe(receive(), self.loop).result(HANGS_S)

    def health(self, path: str = "/health") -> tuple[int, str, str]:
        answer = httpx2.get(self.url + path)
        return answer.status_code, answer.json()["status"], answer.json()["reason"]

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the samples of a metric, by their labels' values but for model and replica."""
        families = text_string_to_metric_families(httpx2.get(f"{self.url}/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        skipped = ("model_name", "replica")
        return {tuple(v for k, v in s.labels.items() if k not in skipped): s.value for s in samples}


@pytest.fixture
def front() -> Iterator[Front]:
    config = compose_one([], ServeConfig, "serve")
    intake, metrics, said = Intake(make_plan(config)), Metrics("mine", 100), []
    client = EngineClient(config, intake.tokenizer, metrics, lambda level, text: said.append((level, text)))
    live, metrics.idle_by_cause = Live("mine", client), idle_by_cause
    app = make_app(
        Service(
            config=config.serve,
            keys=Keys(()),
            model="mine",
            max_model_len=128,
            intake=intake,
            compiler=Compiler((None, 256, (0,))),
            client=client,
            metrics=metrics,
            monitor=Monitor([live], ()),
            is_local=True,
        )
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        watching = asyncio.create_task(live.run())
        await server.serve()
        watching.cancel()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    found = Front(f"http://127.0.0.1:{port}", client, metrics, said, loop)
    found.tell(Started(["node"] * STAGES, STAGES, 100))
    yield found
    server.should_exit = True
    thread.join(HANGS_S)
    loop.close()


def test_health_and_metrics_while_a_fault_is_repaired(front: Front) -> None:
    now = time.monotonic()
    front.tell(snapshot(ended=now))
    assert front.health()[:2] == (200, "ready")
    front.tell(snapshot(fault(now - 2, None), ended=now - 3))
    for path in ("/health", "/health/ready"):
        code, status, reason = front.health(path)
        assert (code, status) == (503, "recovering")
        assert "rank 1 ended with signal 9" in reason
    assert front.health("/health/live")[0] == 200
    assert front.values("gapless:replica_ready") == {(): 0.0}
    assert set(front.values("gapless:recoveries_total").values()) == {0.0}
    before = front.values("gapless:stage_idle_seconds_total")
    assert 2.0 <= before["recovery", "0"] < 30.0  # it is counted before it is over
    assert before["starved_no_request", "0"] == 0.0

    front.tell(snapshot(fault(now - 2, None), fault(now - 1, None, "hang", 2), ended=now - 3))
    front.tell(snapshot(fault(now - 2, now + 2), fault(now + 2, now + 5, "hang", 2), ended=now + 9))
    assert front.health()[:2] == (200, "ready")
    recoveries = front.values("gapless:recoveries_total")
    assert recoveries == {("process",): 1.0, ("hang",): 1.0, ("error",): 0.0, ("connection",): 0.0}
    parts = front.values("gapless:recovery_seconds_total")
    assert parts == pytest.approx({("detect",): 1.0, ("start",): 4.0, ("weights",): 2.0})
    assert front.values("gapless:pipeline_epoch") == {(): 2.0}
    after = front.values("gapless:stage_idle_seconds_total")
    assert after["recovery", "0"] >= before["recovery", "0"]
    assert [level for level, _ in front.said] == [logging.WARNING] * 2
    assert "rank 1" in front.said[0][1]


def test_a_fault_leaves_a_shutdown_and_a_failure_as_they_are(front: Front) -> None:
    now = time.monotonic()
    front.client.drain()
    front.tell(snapshot(fault(now, None), ended=now))
    assert front.health()[:2] == (503, "draining")
    front.tell(Failed("gave up"))
    front.tell(snapshot(fault(now, None), ended=now))
    assert front.health()[:2] == (503, "failed")


def test_a_fleet_prefers_replicas_that_are_ready() -> None:
    config = compose_one(["serve.replicas=2"], ServeConfig, "serve")
    tokenizer = Intake(make_plan(config)).tokenizer
    fleet = ReplicaSet(config, tokenizer, Metrics("mine", 100), lambda *said: None, kv_tokens=1600)
    down = encoder.encode(snapshot(fault(1.0, None), ended=0.0))
    for replica in fleet.replicas:
        replica.receive(encoder.encode(Started([], STAGES, 100)))
    fleet.replicas[0].receive(down)
    assert [replica.state for replica in fleet.replicas] == ["recovering", "ready"]
    assert fleet.state == "ready"
    fleet.replicas[1].receive(down)
    assert fleet.state == "recovering"
    assert "rank 1 ended" in fleet.reason


def test_waits_that_are_not_over_have_their_cause() -> None:
    idle = idle_at(snapshot(ended=10.0, is_idle=True), 14.0)
    assert [row[Cause.STARVED_NO_REQUEST.code] for row in idle] == [4.0] * STAGES
    down = idle_at(snapshot(fault(11.0, None), ended=10.0, is_idle=True), 14.0)
    assert [row[Cause.RECOVERY.code] for row in down] == [3.0] * STAGES
    assert [sum(row) for row in down] == [3.0] * STAGES
    assert idle_at(snapshot(fault(11.0, 12.0), ended=10.0), 14.0) == [[0.0] * len(CAUSES)] * STAGES


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")
def test_the_live_page_says_so(front: Front, tmp_path: Path) -> None:
    with browsing(tmp_path) as browser:
        browser.open(front.url)
        front.tell(snapshot(ended=time.monotonic()))
        browser.until("document.getElementById('status').innerText === 'takes requests'")
        assert browser.run("return document.getElementById('faults').innerText") == ""
        now = time.monotonic()
        front.tell(snapshot(fault(now, None), ended=now))
        browser.until("document.getElementById('status').innerText === 'recovering'")
        browser.until("document.getElementById('alert').innerText.includes('rank 1 ended with signal 9')")
        assert browser.run("return document.getElementById('alert').hidden") is False
        assert "1 fault" in browser.run("return document.getElementById('faults').innerText")
        browser.until("[...document.querySelectorAll('#causes tbody tr')].some(r => r.innerText.includes('recovery'))")
        front.tell(snapshot(fault(now, now + 1), ended=now + 1))
        browser.until("document.getElementById('alert').hidden")
        text = "document.getElementById('fault-list').innerText"
        browser.until(f"{text}.includes('rank 1 ended with signal 9 (process); recovered after 1 s;')")
        assert "4 requests started over, 99 tokens to compute again" in browser.run(f"return {text}")
        titles = browser.run("return [...document.querySelectorAll('#fault-list .bar i')].map(part => part.title)")
        assert [title.split(":")[0] for title in titles] == ["detect", "start", "weights"]


def test_shares_of_the_machine_s_rates_are_metrics(front: Front) -> None:
    plain = snapshot(ended=time.monotonic())
    front.tell(plain)
    assert front.values("gapless:stage_mfu") == {}
    compute = [
        ComputeShare(1, "decode", 9, 4.0, 2.0, 0.02, 0.5, 0.15, 20.0),
        ComputeShare(1, "mixed", 1, 1.0, 0.9, 0.9, 0.1, 0.15, 20.0),
    ]
    front.tell(msgspec.structs.replace(plain, compute=compute))
    assert front.values("gapless:stage_mfu") == {("decode", "1"): 0.02, ("mixed", "1"): 0.9}
    assert front.values("gapless:stage_bandwidth_share") == {("decode", "1"): 0.5, ("mixed", "1"): 0.1}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")
def test_a_stage_that_is_slow_is_on_the_live_page_and_in_the_metrics(front: Front, tmp_path: Path) -> None:
    now = time.monotonic()
    plain = msgspec.structs.replace(snapshot(ended=now), slow_seconds=[0.0, 2.5])
    slow = msgspec.structs.replace(plain, slow=[Slow(1, now - 6.0, 2.34, 4.125)])
    alert = "document.getElementById('alert').textContent"
    front.tell(slow)
    assert front.values("gapless:stage_slowdown") == {("0",): 1.0, ("1",): 2.34}
    assert front.values("gapless:stage_slow_seconds_total") == {("0",): 0.0, ("1",): 2.5}
    with browsing(tmp_path) as browser:
        browser.open(front.url)
        found = browser.until(alert)
        assert re.fullmatch(
            r"Stage 1 is slow: 2\.3 times its usual for \d+ s; the others? ha(s|ve) waited 4\.1 s for it\.", found
        )
        front.tell(plain)
        browser.until(f"{alert} === ''")
        assert browser.run("return document.getElementById('alert').hidden") is True
    assert front.values("gapless:stage_slowdown")["1",] == 1.0
