"""Clients that send or read too slowly, or send too much: they are ended, and hold up nobody."""

from __future__ import annotations

import json
import re
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.support.server import Server, serving
from tests.support.tiers import HANGS_S

CLIENTS = 500
READ_S, WRITE_S = 3.0, 2.0
BODY = json.dumps({"prompt": "import os\n", "max_tokens": 4}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * CLIENTS), hard))
    folder = tmp_path_factory.mktemp("serve")
    limits = {"read_timeout_s": READ_S, "write_timeout_s": WRITE_S, "max_connections": CLIENTS + 10}
    with serving(folder, *(f"serve.{name}={value}" for name, value in limits.items())) as started:
        yield started
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(server: Server, receive_buffer: int | None = None) -> socket.socket:
    address = urlsplit(server.url)
    assert address.hostname is not None
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(HANGS_S)
    sock.connect((address.hostname, address.port))
    return sock


def post(body: bytes, path: str = "/v1/completions") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(body), body)


def send_on(sock: socket.socket, piece: bytes) -> None:
    """Send until it fails."""
    began = time.monotonic()
    while time.monotonic() - began < HANGS_S:
        sock.sendall(piece)
        time.sleep(0.05)


def answer_of(sock: socket.socket) -> str:
    """All that comes until the server closes the connection."""
    received = b""
    with sock:
        while piece := sock.recv(1 << 16):
            received += piece
    return received.decode()


def test_500_clients_that_send_a_byte_at_a_time_hold_up_nobody(server: Server) -> None:
    """Half of them send headers, half a body. Each gets 408 after its time, and good requests are answered before."""
    request = post(b" " * 10_000)
    pending = selectors.DefaultSelector()
    began = time.monotonic()
    for number in range(CLIENTS):
        sock = connect(server)
        sock.sendall(request[: 10 if number % 2 else 100])
        sock.setblocking(False)
        pending.register(sock, selectors.EVENT_READ, b"")
    overtook, endings = 0, []
    while pending.get_map():
        for key, _ in pending.select(0):
            assert isinstance(key.fileobj, socket.socket)
            piece = key.fileobj.recv(4096)
            pending.modify(key.fileobj, selectors.EVENT_READ, key.data + piece)
            if not piece:
                endings.append((key.data, time.monotonic() - began))
                pending.unregister(key.fileobj)
                key.fileobj.close()
        for key in list(pending.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            if not key.data:
                key.fileobj.send(b"x")
        assert httpx2.post(f"{server.url}/v1/completions", content=BODY).status_code == 200
        overtook += len(pending.select(0)) < len(pending.get_map())
        time.sleep(0.1)
    assert len(endings) == CLIENTS
    assert all(answer.startswith(b"HTTP/1.1 408 ") and b"serve.read_timeout_s" in answer for answer, _ in endings)
    assert min(seconds for _, seconds in endings) > READ_S - 0.5
    assert overtook


@pytest.mark.parametrize(("status", "megabytes", "pause_s"), [(408, 20, 0.05), (413, 40, 0.0)])
def test_a_client_that_still_sends_gets_its_answer(server: Server, status: int, megabytes: int, pause_s: float) -> None:
    """It sends on for 0.3 s after the answer has come, before it reads. Soon after that, its connection is closed."""
    sock = connect(server)
    reader = selectors.DefaultSelector()
    reader.register(sock, selectors.EVENT_READ)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (megabytes << 20))
    piece = b" " * (100_000 if status == 413 else 1000)
    while not reader.select(0):
        sock.sendall(piece)
        time.sleep(pause_s)
    began = time.monotonic()
    while time.monotonic() - began < 0.3:
        sock.sendall(piece)
        time.sleep(pause_s)
    received = b""
    while more := sock.recv(1 << 16):
        received += more
    head, _, body = received.decode().partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "connection: close" in head
    assert json.loads(body)["error"]["message"]
    with sock, pytest.raises((ConnectionResetError, BrokenPipeError)):
        send_on(sock, piece)


def test_a_request_may_pause_within_its_time(server: Server) -> None:
    request = post(BODY)
    sock = connect(server)
    for part in (request[:20], request[20:70], request[70:]):
        sock.sendall(part)
        time.sleep(0.3)
    assert sock.recv(4096).startswith(b"HTTP/1.1 200 ")
    sock.sendall(b"\r\n")  # between two requests of a connection that is kept: the time runs from the first byte
    assert "408" in answer_of(sock)


def test_a_head_without_end_is_refused(server: Server) -> None:
    sock = connect(server)
    sock.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * (100 << 10))
    assert answer_of(sock).startswith("HTTP/1.1 431 ")


def test_what_is_no_http_gets_an_error_with_a_body(server: Server) -> None:
    sock = connect(server)
    sock.sendall(b"no HTTP at all\r\n\r\n")
    head, _, body = answer_of(sock).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 400 ")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_one_connection_too_many_is_turned_away(server: Server) -> None:
    socks = [connect(server) for _ in range(CLIENTS + 10)]
    with connect(server) as last:
        assert last.recv(4096).startswith(b"HTTP/1.1 503 ")
    for sock in socks:
        sock.close()
    server.until_ready()


def gauge(server: Server, name: str) -> float:
    text = httpx2.get(f"{server.url}/metrics").text
    return float(re.findall(rf"^gapless:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)[0])


@pytest.mark.slow
def test_a_client_that_does_not_read_its_stream_loses_it(server: Server) -> None:
    """Its requests end and their blocks are free, though they had more tokens to come."""
    body = {"prompt": ["x"] * 16, "n": 16, "max_tokens": 900, "ignore_eos": True, "stream": True}
    aborted = r'request_success_total{finished_reason="abort",model_name="shipped"} (\S+)'
    sock = connect(server, receive_buffer=4096)
    sock.sendall(post(json.dumps(body).encode()))
    server.until(lambda: gauge(server, "num_requests_running"))
    server.until(lambda: not gauge(server, "num_requests_running"))  # all that fits into the buffers is computed first
    server.until(lambda: not httpx2.get(f"{server.url}/load").json()["server_load"])
    assert gauge(server, "kv_cache_usage_perc") == 0
    (count,) = re.findall(aborted, httpx2.get(f"{server.url}/metrics").text)
    assert float(count) > 0
    assert "[DONE]" not in answer_of(sock)


def test_a_slow_reader_gets_its_whole_stream(server: Server) -> None:
    """It pauses, but never for as long as serve.write_timeout_s."""
    body = {"prompt": ["x"] * 4, "n": 16, "max_tokens": 40, "ignore_eos": True, "stream": True}
    sock = connect(server, receive_buffer=4096)
    sock.sendall(post(json.dumps(body).encode()))
    received, began = b"", time.monotonic()
    while b"data: [DONE]" not in received:
        received += sock.recv(8192)
        if time.monotonic() - began < 2 * WRITE_S:
            time.sleep(0.1)
    sock.close()
    assert received.count(b'"finish_reason":"length"') == 64
