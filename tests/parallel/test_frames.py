"""Frames put together from whatever pieces come, and what a rank does with them before and after its welcome."""

from __future__ import annotations

import socket
import threading

import pytest

from gapless.parallel.control import ControlClient, Endpoint
from gapless.parallel.frames import DATA, JOIN, WELCOME, ConnectionLost, FrameBuffer, FrameSocket, pack
from tests.support.tiers import HANGS_S

FRAMES = [(DATA, b""), (JOIN, b"x"), (DATA, bytes(range(256)) * 3), (DATA, b"end")]


@pytest.mark.parametrize("size", [1, 3, 5, 100, 10_000])
def test_frames_are_whole_wherever_they_were_cut(size: int) -> None:
    sent = b"".join(pack(*frame) for frame in FRAMES)
    buffer, found = FrameBuffer(), []
    for start in range(0, len(sent), size):
        found += buffer.feed(sent[start : start + size])
    assert found == FRAMES


def test_a_frame_has_a_kind_and_at_most_its_bound() -> None:
    assert FrameBuffer(4).feed(pack(DATA, b"abc")) == [(DATA, b"abc")]
    for frame in (pack(DATA, b"abcd"), b"\0\0\0\0"):
        with pytest.raises(ConnectionLost, match=r"^a frame of "):
            FrameBuffer(4).feed(frame)


def test_what_comes_with_the_welcome_is_received_and_a_look_takes_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def admit() -> None:
            for more in (b"", pack(DATA, b"first")):
                connection = FrameSocket(listener.accept()[0])
                connection.receive(5)
                connection.socket.sendall(pack(WELCOME, b"") + more)
                connections.append(connection)

        connections: list[FrameSocket] = []
        thread = threading.Thread(target=admit)
        thread.start()
        client = ControlClient(Endpoint(*listener.getsockname(), "a secret"), 0, 5.0)
        thread.join(timeout=HANGS_S)
        connections[1].send(DATA, b"second")
        connections[1].socket.close()  # so that nothing below can wait for ever
        assert not client.is_cut_off()
        assert client.receive() == [b"first"]
        assert not client.is_cut_off()
        assert client.receive() == [b"second"]
        assert client.is_cut_off()
        with pytest.raises(ConnectionLost):
            client.receive()
        client.close()
        connections[0].socket.close()
