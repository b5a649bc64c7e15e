"""An existing Ray cluster that this process has joined: failure detection and return."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from typing import Any

from .local_ray import hush

_RAYS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_LOOK_S = 1.0  # poll interval
_ANSWER_S = 0.2  # connection timeout of the GCS


class JoinedRay:
    """Watches this node's raylet and the GCS, which every Ray process needs.

    The death of the raylet is noticed at once. A GCS may restart with its state, as with Redis. It is considered dead
    after half of Ray's reconnect timeout, at which Ray would end this process.
    """

    def __init__(self) -> None:
        from ray._private import worker

        node: Any = worker._global_node
        self._unhush = hush()
        self._node: str = node.node_ip_address
        self._socket: str = node.raylet_socket_name
        self._connection: socket.socket | None = None  # to the raylet, which logs every connection: keep one
        self.gcs: str = node.gcs_address
        self._patience_s = float(os.environ.get(_RAYS_PATIENCE, "60")) / 2
        self._seen = self._looked = time.monotonic()  # when the GCS was last seen; when `is_back` last looked

    @property
    def fault(self) -> str | None:
        """The processes that have died, if any."""
        now = time.monotonic()
        ended = [] if self._has_raylet() else [f"raylet of node {self._node}"]
        if ended or now > self._seen + _LOOK_S:
            if self._has_gcs():
                self._seen = now
            elif ended or now > self._seen + self._patience_s:
                ended.append(f"GCS at {self.gcs}")
        return f"Ray's {' and '.join(ended)} {'has' if len(ended) == 1 else 'have'} died" if ended else None

    @property
    def is_back(self) -> bool:
        """Whether a GCS listens at the same address again and a raylet runs on this machine."""
        from ray._private.services import find_node_ids

        now = time.monotonic()
        if now < self._looked + _LOOK_S:
            return False
        self._looked = now
        return self._has_gcs() and bool(find_node_ids())

    def end(self) -> None:
        """Disconnect from Ray, even if it is partly dead."""
        import ray

        if self._connection is not None:
            self._connection.close()
        ray.shutdown()
        self._unhush()

    def _has_raylet(self) -> bool:
        if self._connection is not None:
            try:
                self._connection.recv(1)
            except BlockingIOError:
                return True
            except OSError:
                pass
            self._connection.close()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.setblocking(False)
        return self._connection.connect_ex(self._socket) in (0, errno.EAGAIN)

    def _has_gcs(self) -> bool:
        host, _, port = self.gcs.rpartition(":")
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S):
            return True
        return False
