"""Server-sent events of the live page: new spans of the stages, engine state, per-second statistics.

The engine sends spans only while there are viewers, which share them. Events contain no request text.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from ....runtime.analysis.drawing.timeline_block import causes_head
from ....runtime.analysis.live.recording import decoder
from ....runtime.core.run_record import RunRecord
from ....runtime.serving.messages import LiveSpans, Watched
from ..errors import ApiError
from ..replica_set import Engine
from ..streaming import until_gone
from .last_minute import WINDOW, LastMinute
from .live_window import LiveWindow, WindowWords

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

MAX_VIEWERS = 32
MAX_EVENTS = 24  # pending events per viewer
_SHOWN = ("running", "waiting", "kv_blocks_used", "is_short_of_kv", "is_idle", "ends", "preemptions")
_TICKS_PER_S = 4
_PAUSE = 20  # pause after each analysis, as a multiple of its duration, to leave CPU time to the stages


class Viewer:
    """The pending events of one viewer. A viewer that falls behind loses them and starts over."""

    def __init__(self, hello: bytes) -> None:
        self._events = deque([hello])
        self._is_new = asyncio.Event()
        self._is_new.set()
        self._is_closed = False

    def offer(self, event: bytes) -> bool:
        """Add an event; False if the viewer has too many already."""
        if len(self._events) >= MAX_EVENTS:
            return False
        self._events.append(event)
        self._is_new.set()
        return True

    def restart(self, hello: bytes) -> None:
        """Replace all events with a new viewer's first event."""
        self._events = deque([hello])
        self._is_new.set()

    def close(self) -> None:
        """End the stream: `next` returns an empty result from now on."""
        self._is_closed = True
        self._is_new.set()

    async def next(self) -> bytes:
        """Wait for pending events and return them; empty once the viewer is closed."""
        await self._is_new.wait()
        if self._is_closed:
            return b""
        self._is_new.clear()
        events = b"".join(self._events)
        self._events.clear()
        return events


class Live:
    """Streams the state of the pipeline to viewers.

    Args:
        model: the model's name.
        engine: the engine, or several replicas.
        replica: the replica to show, whose per-second statistics this class also advances.
        said_of: explains the largest costs of a window; called in a thread.
        has_chat: the model has a chat template.
    """

    def __init__(
        self,
        model: str,
        engine: Engine,
        replica: int = 0,
        *,
        said_of: Callable[[RunRecord], WindowWords] = lambda record: WindowWords(),
        has_chat: bool = False,
    ) -> None:
        self._model = model
        self._has_chat = has_chat
        self._replica = replica
        self._said_of = said_of
        self._said = WindowWords()
        self._finding_words: asyncio.Task[None] | None = None
        self._newest = LiveWindow(WINDOW, time.monotonic())
        self._num_replicas = len(engine.replicas)
        self._client = client = engine.replicas[replica]
        self._last_minute = client.token_times = LastMinute(client.num_blocks, time.monotonic())
        self._viewers: set[Viewer] = set()
        self._was_started = False
        client.listen(LiveSpans, lambda message, payload: self._offer("spans", msgspec.structs.asdict(message)))
        client.listen(Watched, lambda message, payload: self._newest.take(decoder.decode(message.part)))

    async def run(self) -> None:
        """Advance the seconds of the last minute and send the state, until cancelled."""
        tick = 0
        due = time.monotonic()
        try:
            while True:
                due = max(due + 1 / _TICKS_PER_S, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
                tick += 1
                if tick % _TICKS_PER_S == 0:
                    self._last_minute.end_second(self._client.snapshot, time.monotonic())
                if self._viewers:
                    if self._finding_words is None or self._finding_words.done():
                        self._finding_words = asyncio.create_task(self._find_words())
                    self._tell(is_second=tick % _TICKS_PER_S == 0)
        finally:
            if self._finding_words is not None:
                self._finding_words.cancel()
            for viewer in self._viewers:
                viewer.close()

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Context manager that registers a viewer.

        Raises:
            ApiError: there are too many viewers.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise ApiError(429, f"the live page has {MAX_VIEWERS} viewers already", code="rate_limit_exceeded")
        viewer = Viewer(self._hello())
        self._viewers.add(viewer)
        if len(self._viewers) == 1:
            self._was_started = self._client.started is not None
            self._watch()
        try:
            yield viewer
        finally:
            self._viewers.remove(viewer)
            if not self._viewers:
                self._client.watch(False)

    def _watch(self) -> None:
        self._newest.clear(time.monotonic())
        self._said = WindowWords()
        self._client.watch(True)

    async def _find_words(self) -> None:
        """Explain the last seconds in words, in a thread, then pause for a multiple of the time spent."""
        found, began = self._client.snapshot, time.monotonic()
        record = None if found is None else self._newest.record_at(began, found)
        self._said = WindowWords() if record is None else await asyncio.to_thread(self._said_of, record)
        await asyncio.sleep(max(1.0, _PAUSE * (time.monotonic() - began)))

    def _tell(self, is_second: bool) -> None:
        client = self._client
        if self._was_started != (client.started is not None):
            self._was_started = client.started is not None
            self._watch()  # messages sent before the engine started are lost
            for viewer in self._viewers:
                viewer.restart(self._hello())
        self._offer("state", self._state())
        if is_second:
            self._offer("second", {"row": self._last_minute.newest_row, **self._window()})

    def _offer(self, name: str, body: dict[str, Any]) -> None:
        event = _event(name, body)
        late = [viewer for viewer in self._viewers if not viewer.offer(event)]
        if late:
            hello = self._hello()
            for viewer in late:
                viewer.restart(hello)

    def _hello(self) -> bytes:
        started = self._client.started
        body: dict[str, Any] = {
            "model": self._model,
            "chat": self._has_chat,
            "replica": self._replica,
            "replicas": self._num_replicas,
            "stages": started.num_stages if started else 0,
            "where": started.where if started else [],
            "blocks": started.num_blocks if started else 0,
            "causes": causes_head(),
            "rows": self._last_minute.rows,
            **self._state(),
            **self._window(),
        }
        return _event("hello", body)

    def _state(self) -> dict[str, Any]:
        client, found = self._client, self._client.snapshot
        body: dict[str, Any] = {"time": time.monotonic(), "state": client.state, "reason": client.reason}
        if found is not None:
            body |= {
                **{name: getattr(found, name) for name in _SHOWN},
                "fault_since": found.recovery.since,
                "faults": sum(found.recovery.repaired.values()) + found.is_recovering,
                "slow": [msgspec.structs.asdict(each) for each in found.slow],
            }
        return body

    def _window(self) -> dict[str, Any]:
        minute, found = self._last_minute, self._client.snapshot
        return {
            "window_s": minute.window_s,
            "percentiles_ms": minute.percentiles_ms,
            "stage_seconds": minute.stage_seconds,
            "tokens_per_s": round(minute.tokens_per_s, 1),
            "newest_faults": [] if found is None else found.recovery.newest,
            **msgspec.structs.asdict(self._said),
        }


class LiveStream(Response):
    """Sends a viewer its events until it disconnects or the server stops."""

    media_type = "text/event-stream"

    def __init__(self, live: Live) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events as they occur, until the viewer disconnects or is closed."""
        with self._live.viewer() as viewer:
            gone = asyncio.create_task(until_gone(receive))
            gone.add_done_callback(lambda task: viewer.close())
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                while events := await viewer.next():
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                gone.cancel()


def _event(name: str, body: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
