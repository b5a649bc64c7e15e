"""Writes the difference of two runs: `diff.html`, and its numbers as `diff.json`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..run_folder.files import write_text
from .difference_page import render_difference
from .difference_words import sentences
from .request_difference import RequestChange
from .run_difference import RunDifference
from .run_noise import Noise
from .tail_difference import Latency, Tail

PAGE, NUMBERS = "diff.html", "diff.json"


def write_difference(path: Path, difference: RunDifference) -> dict[str, Any]:
    """Write the page and the numbers into the folder `path`, made if need be; return what `diff.json` holds.

    Seconds are in the mean of the stages but under `by_stage`. `parts` and `requests` each sum to `change`, and so do
    the parts of each stage.
    """
    path.mkdir(parents=True, exist_ok=True)
    numbers = difference_json(difference)
    write_text(path / NUMBERS, json.dumps(numbers, indent=2) + "\n")
    write_text(path / PAGE, render_difference(difference))
    return numbers


def difference_json(difference: RunDifference) -> dict[str, Any]:
    """Return what `diff.json` holds."""
    found, (base, run) = difference.makespan, difference.folders
    return {
        "base": str(base.path),
        "run": str(run.path),
        "repeats": list(difference.repeats),
        "words": sentences(difference),
        "changed": [asdict(each) for each in difference.changed],
        "makespan": {
            "base": found.base,
            "run": found.run,
            "change": found.change,
            "base_seconds": dict(found.before),
            "run_seconds": dict(found.after),
            "parts": dict(found.parts),
            "by_stage": [dict(parts) for parts in found.by_stage],
            "slowdown": found.slowdown,
            "slowdowns": list(found.slowdowns),
            "origin": asdict(found.origin),
            "noise": _noise(difference.makespan_noise),
        },
        "requests": [_request(each) for each in difference.requests.changes],
        **{f"p99_{latency}": _tail(difference, latency) for latency in difference.tails},
    }


def _request(change: RequestChange) -> dict[str, Any]:
    return {
        "name": change.name,
        "requests": list(change.requests),
        "prompt_tokens": change.tokens[0],
        "output_tokens": change.tokens[1],
        "change": change.change,
        "parts": {part: seconds for part, seconds in change.parts.items() if seconds},
    }


def _tail(difference: RunDifference, latency: Latency) -> dict[str, Any]:
    tail = difference.tails[latency]
    return {
        "base": _side(tail.base),
        "run": _side(tail.run),
        "change": tail.change,
        "parts": tail.parts,
        "by_stage": tail.by_stage,
        "noise": _noise(difference.tail_noise(latency)),
    }


def _side(tail: Tail) -> dict[str, Any]:
    return {
        "seconds": tail.seconds,
        "parts": dict(tail.parts),
        "intervals": tail.intervals,
        "requests": [{"request": request, "intervals": count} for request, count in tail.requests],
        "prompts": [{"request": request, "intervals": count} for request, count in tail.prompts],
        "prefill_tokens": tail.prefill,
        "decodes": tail.decodes,
    }


def _noise(noise: Noise | None) -> dict[str, Any] | None:
    return None if noise is None else {**asdict(noise), "covers": noise.covers}
