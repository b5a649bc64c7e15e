"""The control plane: one TCP connection per rank to the coordinator, which carries frames.

A second connection per rank carries its requests to torch.distributed's store (`parallel/store.py`).

When one side dies, its connection closes, and the other side notices at once, under any launcher. The coordinator
listens on the given address until all ranks have joined, and again while it waits for replacements. A connecting rank
must know the secret.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..conf.errors import ConfigError
from .admission import Admission, boot_id
from .frames import DATA, JOIN, PING, PONG, STORE, WELCOME, ConnectionLost, FrameSocket, pack
from .store_server import StoreServer

_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address on which the coordinator listens, and the secret that a rank needs to join."""

    host: str
    port: int
    secret: str


class ControlServer:
    """The coordinator's side: accepts `world_size` ranks, sends each frame to all of them, receives from each.

    Raises:
        ConfigError: `host` is not an address of this machine.
    """

    def __init__(self, host: str, world_size: int, secret: str) -> None:
        try:
            self._admission = Admission(host, range(world_size), secret)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
            raise ConfigError(
                f"parallel.host={host}: must be an address of this machine that the ranks can reach ({reason})"
            ) from error
        self.endpoint = Endpoint(*self._admission.address, secret)
        self._host = host
        self._world_size = world_size
        self._ranks: dict[int, FrameSocket] = {}
        self._store = StoreServer()
        self._selector = selectors.DefaultSelector()
        self.is_woken = False  # whether a `wake_on` descriptor was readable in the last `poll`
        self.node: dict[int, str] = {}  # by rank: the boot id of its node
        self.clock_offset: dict[int, float] = {}  # by rank: its monotonic clock minus ours, in seconds

    @property
    def connected(self) -> set[int]:
        """The ranks that are connected."""
        return set(self._ranks)

    def accept(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a rank's next connection. Return whether all ranks have joined.

        The port is closed once they have.
        """
        if not self._admission.is_complete and (member := self._admission.next(timeout)) is not None:
            if member.is_store:
                self._store.add(member.connection)
            else:
                self.node[member.rank] = member.boot
                self.clock_offset[member.rank] = member.clock_offset
                self._ranks[member.rank] = member.connection
                self._selector.register(member.connection.socket, selectors.EVENT_READ, member.rank)
            if self._admission.is_complete:
                self._admission.close()
        return len(self._ranks) == self._world_size

    def renumber(self, world_size: int, secret: str) -> None:
        """Disconnect all ranks, and accept `world_size` ranks at a new `endpoint`."""
        self._world_size = world_size
        self.node.clear()
        self.clock_offset.clear()
        self.replace(self.connected, secret)

    def replace(self, ranks: Iterable[int], secret: str) -> None:
        """Disconnect `ranks`, and accept replacements at a new `endpoint`."""
        for rank in set(ranks) & self.connected:
            self._disconnect(rank)
        self._admission.close()
        self._admission = Admission(self._host, set(range(self._world_size)) - self.connected, secret)
        self.endpoint = Endpoint(*self._admission.address, secret)
        if self._admission.is_complete:
            self._admission.close()

    def publish(self, payload: bytes, to: Iterable[int] | None = None) -> None:
        """Send one frame to every rank, or to the ranks in `to`. Lost ranks are skipped; `poll` reports them."""
        frame = pack(DATA, payload)
        for rank in list(self._ranks) if to is None else to:
            try:
                self._ranks[rank].socket.sendall(frame)
            except (OSError, KeyError):
                continue

    def wake_on(self, descriptor: int) -> None:
        """Have `poll` return at once while this file descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def poll(self, timeout: float) -> list[tuple[int, bytes | None]]:
        """Return the (rank, payload) pairs received within `timeout` seconds. A payload of None: the rank is gone."""
        received: list[tuple[int, bytes | None]] = []
        self.is_woken = False
        for key, _ in self._selector.select(timeout):
            rank = key.data
            if rank is None:
                self.is_woken = True
                continue
            if rank not in self._ranks:  # disconnected meanwhile
                continue
            try:
                received += [(rank, payload) for _, payload in self._ranks[rank].receive_once()]
            except ConnectionLost:
                self._disconnect(rank)
                received.append((rank, None))
        return received

    def _disconnect(self, rank: int) -> None:
        connection = self._ranks.pop(rank)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def close(self) -> None:
        """Close the connections of all ranks, the store and the port."""
        for rank in list(self._ranks):
            self._disconnect(rank)
        self._store.close()
        self._selector.close()
        self._admission.close()


class ControlClient:
    """A rank's side of the control connection: joins on creation, then exchanges frames with the coordinator.

    Raises:
        ConnectionLost: the coordinator is gone, or refused this rank.
    """

    def __init__(self, endpoint: Endpoint, rank: int, timeout: float) -> None:
        self._sending = threading.Lock()
        self._unread: list[bytes] = []  # payloads received together with the welcome
        self.store_connection = self._join(STORE, endpoint, rank, timeout)
        try:
            self._connection = self._join(JOIN, endpoint, rank, timeout)
        except BaseException:
            self.store_connection.socket.close()
            raise

    def _join(self, kind: bytes, endpoint: Endpoint, rank: int, timeout: float) -> FrameSocket:
        """Connect and wait for the welcome. Retry if the connection is closed first, as when strangers crowd us out."""
        deadline = time.monotonic() + timeout
        while True:
            sock = socket.create_connection((endpoint.host, endpoint.port), max(0.1, deadline - time.monotonic()))
            sock.settimeout(None)
            connection = FrameSocket(sock)
            try:
                connection.send(kind, f"{endpoint.secret}\n{rank}\n{boot_id()}".encode())
                is_welcome = self._await_welcome(connection, deadline)
            except OSError as error:
                sock.close()
                if not isinstance(error, ConnectionError) or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
                continue
            if not is_welcome:
                sock.close()
                raise ConnectionLost("the coordinator refused this rank")
            return connection

    def _await_welcome(self, connection: FrameSocket, deadline: float) -> bool:
        """Answer the coordinator until it welcomes this rank (True) or refuses it (False)."""
        answer = None
        while answer is None:
            for kind, payload in connection.receive(deadline - time.monotonic()):
                if kind == PING:
                    connection.send(PONG, struct.pack("!d", time.monotonic()))
                elif kind == DATA:
                    self._unread.append(payload)
                else:
                    answer = kind
        return answer == WELCOME

    @property
    def host(self) -> str:
        """The address of this node on the interface that reaches the coordinator."""
        return str(self._connection.socket.getsockname()[0])

    def send(self, payload: bytes) -> None:
        """Send one frame to the coordinator. Any thread may send.

        Raises:
            ConnectionLost: the coordinator is gone.
        """
        try:
            with self._sending:
                self._connection.send(DATA, payload)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self) -> list[bytes]:
        """Block until at least one frame is complete; return the payloads of the complete ones.

        Raises:
            ConnectionLost: the coordinator is gone.
        """
        payloads, self._unread = self._unread, []
        while not payloads:
            payloads = [payload for _, payload in self._connection.receive_once()]
        return payloads

    def is_cut_off(self) -> bool:
        """Return whether the coordinator has closed the connection and no data is left unread."""
        try:
            return not self._connection.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the control connection and the store connection."""
        self._connection.socket.close()
        self.store_connection.socket.close()
