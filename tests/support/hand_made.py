"""Runs made by hand, whose numbers are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gapless.runtime.analysis.report.run_groups import RunGroup
from gapless.runtime.analysis.run_folder.read import RunFolder
from gapless.runtime.core.messages import Span
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from gapless.runtime.core.stage_floor import AttentionLayers, RowWork, StageFloor, StageMachine


def one_stage() -> RunRecord:
    """One stage, two requests that complete and one that is aborted; 10 s on the clock is the first arrival."""
    micro_batches = [
        MicroBatchRecord(0, 10.0, [SegmentRecord(0, 0, 8)], DecodesRecord.at(), kv_blocks_used=2),
        MicroBatchRecord(
            1,
            12.0,
            [SegmentRecord(1, 0, 4)],
            DecodesRecord.at([0], [8]),
            [Wait(11.0, 12.0, "kv_full")],
            kv_blocks_used=5,
        ),
        MicroBatchRecord(
            2, 15.0, [], DecodesRecord.at([0, 1], [9, 4]), [Wait(14.0, 14.5, "in_flight")], kv_blocks_used=3
        ),
    ]
    spans = [span(0, 0, 10, 11), span(1, 0, 12, 14), span(2, 0, 15, 16)]
    requests = [
        RequestRecord(0, 8, 10.0, [11.0, 14.0, 16.0], 10.0, 16.0, "length", preemptions=1),
        RequestRecord(1, 4, 10.5, [14.0, 16.5], 12.0, 16.5, "stop"),
        RequestRecord(2, 4, 10.5, finished=11.0, finish_reason="abort"),
    ]
    return RunRecord(1, 10, micro_batches, spans, requests)


def span(micro_batch: int, stage: int, begin: float, end: float) -> Span:
    return Span(micro_batch, stage, begin, begin, begin, end, end)


def config(*, name: str = "sarathi", chunk: Any = 256, depth: int | None = None, **more: Any) -> dict[str, Any]:
    """Return a config in the form that summary.json has."""
    scheduler = {"name": name, "batch": None} | ({"chunk": chunk} if name in ("sarathi", "equal_time") else {})
    return {
        "model": {"name": "tiny"},
        "parallel": {"pp": 2, "depth": depth},
        "scheduler": scheduler,
        "seed": 0,
        **more,
    }


def folder(
    path: str = "run", *, chunk: Any = 256, depth: int | None = None, name: str = "sarathi", **summary: Any
) -> RunFolder:
    """Return a run folder that lies nowhere, with these numbers in its summary."""
    return RunFolder(Path(path), {"config": config(name=name, chunk=chunk, depth=depth), **summary})


def run_group(
    label: str, *, chunk: Any = 256, depth: int | None = None, name: str = "sarathi", **summary: Any
) -> RunGroup:
    return RunGroup(label, [folder(label, chunk=chunk, depth=depth, name=name, **summary)])


def floor(window: int | None = None, slow_reason: str = "", ranks: int = 2) -> StageFloor:
    """Return the work of a stage of 4 layers whose ranks give 2 TFLOP/s and 50 GB/s each, with a head."""
    machine = StageMachine({"float32": 2.0, "bfloat16": 1.0}, 50.0, slow_reason)
    attention = (
        [AttentionLayers(None, 2, 3), AttentionLayers(window, 1, 1)] if window else [AttentionLayers(None, 3, 4)]
    )
    return StageFloor(machine, ranks, RowWork(3e8, 4e8), RowWork(2e8, 1e8), 1e4, 2e3, attention)


def close_to(compute: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `compute` of a summary with numbers that compare as about equal."""
    return [{k: v if k == "phase" else pytest.approx(v, rel=1e-5) for k, v in share.items()} for share in compute]
