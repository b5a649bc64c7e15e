"""Chaos in short: a server whose ranks fail under load loses nothing, and a wrong text would be noticed."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks.chaos import PARTS, Faults, torment
from benchmarks.support.server import gapless_server
from benchmarks.support.unbroken import is_rounding


@pytest.mark.slow
def test_streams_outlive_faults_of_every_kind():
    with gapless_server(["parallel=pp2", "parallel.threads=1", "parallel.max_recoveries=20"]) as server:
        rng = random.Random(0)
        faults = Faults(server, rng)
        rows, clients, _ = asyncio.run(torment(server, faults, ["garbage", "agent", "cut control"], 0.1, 7.0, 6, rng))
        assert sorted(row["fault"] for row in rows) == ["agent", "cut control", "garbage"]
        for row in rows:
            assert sum(row[f"{part}_s"] for part in PARTS) > 0
            assert row["pause_s"] > row["start_s"] > 0
        outcome = clients.outcome
        assert (outcome.lost, outcome.doubled) == ([], 0)
        assert outcome.done >= 6
        assert clients.split_others()[1] == 0
        for question, expected in zip(clients.questions[:2], clients.expected, strict=False):
            assert not is_rounding(server, question, expected, [*expected[:9], (expected[9] + 7) % 300, *expected[10:]])
