"""The engine's process, spoken to as the HTTP front does."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gapless.conf.build import to_mapping
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import ServeConfig
from gapless.launch import compose
from gapless.parallel.frames import DATA, FrameSocket
from gapless.runtime.ledger.causes import CAUSES
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.serving.engine import run_engine
from gapless.runtime.serving.messages import (
    FromEngine,
    Shutdown,
    Snapshot,
    StageSpans,
    Started,
    Submit,
    ToEngine,
    Tokens,
    Watch,
    encoder,
    from_engine,
)
from gapless.runtime.serving.stage_spans import MAX_BOXES, stage_spans
from tests.runtime.report.test_run_page import simulated_run


class Engine:
    def __init__(self, connection: FrameSocket) -> None:
        self._connection = connection
        self._number = 0

    def send(self, message: ToEngine) -> None:
        self._connection.send(DATA, encoder.encode(message))

    def receive(self) -> list[FromEngine]:
        return [from_engine.decode(payload) for _, payload in self._connection.receive(60)]

    def complete(self, tokens: int) -> list[FromEngine]:
        """Send a request; return all that comes until the engine is idle again."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.send(Submit(self._number, [5 + self._number] * 200, params, time.monotonic()))
        self._number += 1
        found: list[FromEngine] = []
        ended = False
        while not (ended and isinstance(found[-1], Snapshot) and found[-1].is_idle):
            found += self.receive()
            ended = any(isinstance(one, Tokens) and one.reasons for one in found)
        return found


@contextmanager
def started() -> Iterator[Engine]:
    (config,) = compose.compose_all([], ServeConfig, "serve", multirun=False)
    ours, theirs = socket.socketpair()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_engine, args=(to_mapping(config), theirs, {}))
    process.start()
    theirs.close()
    engine = Engine(FrameSocket(ours))
    try:
        while not any(isinstance(one, Started) for one in engine.receive()):
            pass
        yield engine
        engine.send(Shutdown())
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()


def test_spans_come_only_while_somebody_looks() -> None:
    """They then are the ledger's seconds."""
    with started() as engine:
        first = engine.complete(20)
        engine.send(Watch(True))
        watched = engine.complete(40)
        engine.send(Watch(False))
        last = engine.complete(20)
    assert not [one for one in (*first, *last) if isinstance(one, StageSpans)]
    spans = [one for one in watched if isinstance(one, StageSpans)]
    assert sum(sum(part.prefill) for part in spans) == 200
    assert sum(sum(part.decodes) for part in spans) == 39
    before, after = first[-1], watched[-1]
    assert isinstance(before, Snapshot)
    assert isinstance(after, Snapshot)
    busy = sum(sum(part.end[0]) - sum(part.begin[0]) for part in spans) / 1e5
    assert busy == pytest.approx(after.busy[0] - before.busy[0], abs=1e-3)
    for cause in CAUSES:
        idle = sum(
            end - start
            for part in spans
            for start, end, code in zip(part.idle_start[0], part.idle_end[0], part.cause[0], strict=True)
            if code == cause.code
        )
        counted = after.idle[0][cause.code] - before.idle[0][cause.code]
        assert idle / 1e5 == pytest.approx(counted, abs=1e-3), cause


def test_a_message_of_spans_is_bounded() -> None:
    """It holds the newest micro-batches, and says how many it leaves out."""
    for stages in (1, 3):
        ledger = Ledger(simulated_run(stages, MAX_BOXES + 500))
        found = stage_spans(ledger, 100)
        shown = len(found.prefill)
        assert shown == MAX_BOXES // stages
        assert found.left_out == MAX_BOXES + 500 - 100 - shown
        for stage in range(stages):
            assert len(found.begin[stage]) == len(found.end[stage]) == shown
            busy = sum(found.end[stage]) - sum(found.begin[stage])
            assert abs(busy / 1e5 - ledger.lanes[stage].seconds[-shown:].sum()) < 1e-5 * shown
            columns = ledger.idle_columns[stage]
            expected = columns.seconds[columns.place >= len(ledger.lanes[stage].begin) - shown].sum()
            idle = sum(found.idle_end[stage]) - sum(found.idle_start[stage])
            assert abs(idle / 1e5 - expected) < 1e-5 * len(found.cause[stage])
