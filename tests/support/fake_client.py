"""The coordinator's end of one rank that runs in this process, without sockets."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from gapless.runtime.core.messages import Stop
from gapless.runtime.pipeline.handshake import encoder, from_rank
from tests.support.tiers import HANGS_S


class FakeClient:
    """Stands for a rank's `ControlClient`. `said` are the messages that the rank has sent."""

    host = "127.0.0.1"
    store_connection: Any = None

    def __init__(self) -> None:
        self.said: list[Any] = []
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def tell(self, message: Any) -> None:
        """Have the rank hear a message."""
        self._told.put(message)

    def receive(self) -> list[bytes]:
        return [encoder.encode(self._told.get())]

    def send(self, payload: bytes) -> None:
        self.said.append(from_rank.decode(payload))

    def of(self, kind: type) -> list[Any]:
        """Return what the rank has said of this kind."""
        return [message for message in self.said if isinstance(message, kind)]

    def until(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + HANGS_S
        while not is_so():
            assert time.monotonic() < deadline, f"the rank said {self.said}"
            time.sleep(0.005)


class Coordinator(threading.Thread):
    """Tells a rank what `script` has it tell, in a thread of its own, and stops it at the end or at an error."""

    def __init__(self, client: FakeClient, script: Callable[[], None]) -> None:
        super().__init__(name="coordinator", daemon=True)
        self._client = client
        self._script = script
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._script()
        except BaseException as error:
            self._error = error
        self._client.tell(Stop())

    def check(self) -> None:
        """Wait for the end of the script; raise what went wrong in it."""
        self.join(HANGS_S)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
