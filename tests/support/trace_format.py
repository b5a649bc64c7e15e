"""Checks a Chrome trace against the Trace Event Format, as far as Perfetto relies on it."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

NANOSECOND = 1e-3  # in the trace's microseconds; sums of floats are less exact
PHASES = {"X", "i", "C", "M", "s", "t", "f"}

Event = dict[str, Any]
Track = tuple[int, int]


def check_trace(trace: dict[str, Any]) -> None:
    """Assert that viewers show all of `trace`, a decoded file, as it is meant."""
    events: list[Event] = trace["traceEvents"]
    assert isinstance(trace.get("otherData"), dict)
    for event in events:
        assert event["ph"] in PHASES, event
        assert event["name"], event
        assert event["pid"] >= 1, event
        assert event.get("tid", 1) >= 1, event
        if event["ph"] != "M":
            assert event["ts"] >= 0, event
        if event["ph"] in "Xistf":
            assert "tid" in event, event
    slices: dict[Track, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            slices[event["pid"], event["tid"]].append(event)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(slices) <= named
    for track in slices.values():
        _check_disjoint(track)
    _check_flows(events)
    _check_counters(events)


def _check_disjoint(track: list[Event]) -> None:
    """Slices of our tracks follow each other; none lies in another."""
    track.sort(key=lambda event: (event["ts"], event["dur"]))
    for a, b in pairwise(track):
        assert a["ts"] + a["dur"] <= b["ts"] + NANOSECOND / 10, (a, b)


def _check_flows(events: list[Event]) -> None:
    """Each flow begins once, ends once, goes forward, and each of its ends lies in a slice that the file has before.

    A viewer sorts events by time and keeps their order where times are equal.
    """
    flows: dict[tuple[str, str, int], list[Event]] = defaultdict(list)
    open_slice: dict[Track, Event] = {}
    order = {id(event): place for place, event in enumerate(events)}
    timed = [event for event in events if event["ph"] in "Xstf"]
    for event in sorted(timed, key=lambda event: (event["ts"], order[id(event)])):
        track = event["pid"], event["tid"]
        if event["ph"] == "X":
            open_slice[track] = event
        else:
            bound = open_slice[track]
            assert bound["cat"] == "compute", (event, bound)
            assert bound["ts"] <= event["ts"] <= bound["ts"] + bound["dur"], (event, bound)
            assert event["ph"] != "f" or event["bp"] == "e", event
            flows[event["cat"], event["name"], event["id"]].append(event)
    for flow in flows.values():
        assert [e["ph"] for e in flow] == ["s", *"t" * (len(flow) - 2), "f"], flow
        assert len({(e["pid"], e["tid"]) for e in flow}) == len(flow), flow


def _check_counters(events: list[Event]) -> None:
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values()), event
            times[event["name"]].append(event["ts"])
    for name, at in times.items():
        assert at == sorted(at), name
