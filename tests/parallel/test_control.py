"""The control plane over real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from gapless.conf.errors import ConfigError
from gapless.parallel import admission, control
from gapless.parallel.control import ControlClient, ControlServer, Endpoint
from gapless.parallel.frames import JOIN, ConnectionLost, FrameSocket
from tests.support.strangers import Strangers
from tests.support.tiers import HANGS_S


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer("127.0.0.1", 2, "a secret")
    yield server
    server.close()


def join(server: ControlServer, rank: int, endpoint: Endpoint | None = None) -> ControlClient:
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(ControlClient, endpoint or server.endpoint, rank, HANGS_S)
        while not client.done():
            server.accept(0.05)
        joined = client.result()
    while rank not in server.connected:  # the rank may know before the server's next turn
        server.accept(0.05)
    return joined


def poll_all(server: ControlServer, count: int) -> list[tuple[int, bytes | None]]:
    got: list[tuple[int, bytes | None]] = []
    deadline = time.monotonic() + HANGS_S
    while len(got) < count and time.monotonic() < deadline:
        got += server.poll(0.2)
    return got


@pytest.mark.parametrize("host", ["203.0.113.7", "127.0.0.1:80"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^parallel\.host={host}: must be an address of this machine") as caught:
        ControlServer(host, 2, "a secret")
    assert "\n" not in str(caught.value)


def test_it_listens_on_the_given_address(server: ControlServer) -> None:
    assert server.endpoint.host == "127.0.0.1"
    assert server.endpoint.port > 0


def test_frames_of_any_size_arrive_whole_and_in_order(server: ControlServer) -> None:
    clients = [join(server, rank) for rank in (1, 0)]
    assert server.connected == {0, 1}
    frames = [bytes([i]) * size for i, size in enumerate((0, 1, 1000, 3_000_000, 7))]
    heard: list[list[bytes]] = [[], []]

    def listen(client: ControlClient, into: list[bytes]) -> None:
        while len(into) < len(frames):
            into += client.receive()

    threads = [threading.Thread(target=listen, args=pair) for pair in zip(clients, heard, strict=True)]
    for thread in threads:
        thread.start()
    for frame in frames:
        server.publish(frame)
    for thread in threads:
        thread.join(timeout=HANGS_S)
    assert heard == [frames, frames]
    clients[0].send(b"from one")
    clients[1].send(b"from zero")
    assert sorted(poll_all(server, 2)) == [(0, b"from zero"), (1, b"from one")]


def test_a_rank_that_ends_is_noticed(server: ControlServer) -> None:
    first, second = join(server, 0), join(server, 1)
    first.send(b"last words")
    first.close()
    assert poll_all(server, 2) == [(0, b"last words"), (0, None)]
    assert server.connected == {1}
    server.publish(b"goes on")
    assert second.receive() == [b"goes on"]


def test_a_coordinator_that_ends_is_noticed(server: ControlServer) -> None:
    client = join(server, 0)
    server.close()
    with pytest.raises(ConnectionLost):
        client.receive()


@pytest.mark.parametrize("secret", ["", "another secret"])
def test_a_rank_without_the_secret_is_refused(server: ControlServer, secret: str) -> None:
    with pytest.raises(ConnectionLost):
        join(server, 0, replace(server.endpoint, secret=secret))
    assert server.connected == set()
    join(server, 0)
    with pytest.raises(ConnectionLost):
        join(server, 0)  # taken
    assert server.connected == {0}


def test_noise_on_the_port_does_no_harm(server: ControlServer) -> None:
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0\0\0\2dx"):
        with socket.create_connection((server.endpoint.host, server.endpoint.port)) as sock:
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
            assert not server.accept(0.1)
    join(server, 0)
    assert server.connected == {0}


@pytest.mark.parametrize("count", [50, 200])
def test_silent_slow_and_noisy_strangers_keep_no_rank_out(count: int) -> None:
    server = ControlServer("127.0.0.1", 4, "a secret")
    with Strangers(server.endpoint, count), ThreadPoolExecutor(4) as pool:
        start = time.monotonic()
        clients = [pool.submit(ControlClient, server.endpoint, rank, HANGS_S) for rank in range(4)]
        while not server.accept(0.1):
            assert time.monotonic() - start < HANGS_S, f"only {server.connected} joined"
        server.publish(b"hello")
        assert [client.result(timeout=HANGS_S).receive() for client in clients] == [[b"hello"]] * 4
    for client in clients:
        client.result().close()
    server.close()


def test_a_stranger_is_closed_after_few_bytes_or_seconds(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_SECRET_TIMEOUT_S", 0.3)
    address = (server.endpoint.host, server.endpoint.port)
    with socket.create_connection(address) as long, socket.create_connection(address) as silent:
        long.sendall((513).to_bytes(4, "big"))
        server.accept(0.1)
        assert long.recv(1) == b"", "a frame of more than 512 bytes"
        server.accept(0.4)
        server.accept(0.0)
        assert silent.recv(1) == b""


def test_the_port_is_closed_once_all_ranks_have_joined(server: ControlServer) -> None:
    clients = [join(server, rank) for rank in range(2)]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((server.endpoint.host, server.endpoint.port))
    server.publish(b"goes on")
    assert [client.receive() for client in clients] == [[b"goes on"]] * 2


def test_only_ranks_that_are_replaced_are_awaited_again(server: ControlServer) -> None:
    stays = join(server, 0)
    join(server, 1)
    old = server.endpoint
    server.replace([1], "another secret")
    assert server.connected == {0}
    with pytest.raises(ConnectionLost):
        join(server, 0)  # it is there
    with pytest.raises(ConnectionLost):
        join(server, 1, replace(server.endpoint, secret=old.secret))
    came = join(server, 1)
    assert server.accept(0.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((server.endpoint.host, server.endpoint.port))
    server.publish(b"goes on")
    assert [client.receive() for client in (stays, came)] == [[b"goes on"]] * 2


def test_a_rank_that_breaks_off_may_try_again(server: ControlServer) -> None:
    """It is of another boot, so that its clock is being measured when it goes."""
    with socket.create_connection((server.endpoint.host, server.endpoint.port)) as sock:
        FrameSocket(sock).send(JOIN, f"{server.endpoint.secret}\n0\nanother boot".encode())
        server.accept(0.1)
    server.accept(0.1)
    join(server, 0)
    assert server.connected == {0}


def test_a_rank_of_another_boot_has_its_clock_measured(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = 1234.5
    clients: list[ControlClient] = []

    def run(endpoint: Endpoint) -> None:
        clients.append(ControlClient(endpoint, 0, HANGS_S))

    monkeypatch.setattr(control, "boot_id", lambda: "another boot")
    real = time.monotonic

    def shifted() -> float:
        return real() + (ahead if threading.current_thread() is thread else 0.0)

    thread = threading.Thread(target=run, args=(server.endpoint,))
    monkeypatch.setattr(control.time, "monotonic", shifted)
    thread.start()
    while thread.is_alive():
        server.accept(0.05)
    assert len(clients) == 1
    assert server.clock_offset[0] == pytest.approx(ahead, abs=1.0)
