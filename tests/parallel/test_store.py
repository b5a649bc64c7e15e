"""The store of torch.distributed over control connections, asked by two ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore

from gapless.parallel.control import ControlClient, ControlServer
from gapless.parallel.frames import ConnectionLost
from gapless.parallel.store import ControlStore
from tests.support.tiers import HANGS_S


@pytest.fixture
def clients() -> Iterator[list[ControlClient]]:
    server = ControlServer("127.0.0.1", 2, "a secret")
    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(ControlClient, server.endpoint, rank, 5.0) for rank in range(2)]
        while not server.accept(1.0):
            pass
        clients = [client.result() for client in joining]
    yield clients
    for client in clients:
        client.close()
    server.close()


@pytest.fixture
def stores(clients: list[ControlClient]) -> list[ControlStore]:
    return [ControlStore(client.store_connection, timedelta(seconds=5)) for client in clients]


def test_what_one_rank_sets_the_other_gets(stores: list[ControlStore]) -> None:
    first, second = stores
    first.set("key", b"\0value")
    first.set("text", "words")
    assert (second.get("key"), second.get("text")) == (b"\0value", b"words")
    assert [store.add("count", 3) for store in stores] == [3, 6]
    assert second.get("count") == b"6"
    assert second.check(["key", "count"])
    assert first.delete_key("key")
    assert not first.delete_key("key")
    assert not second.check(["key", "count"])


def test_what_watchdogs_tell_each_other_stays_in_its_epoch(clients: list[ControlClient]) -> None:
    """NCCL's process groups take the prefixes of torch off, to share what all groups must know."""
    old, other, new = (
        ControlStore(client.store_connection, timedelta(seconds=5), f"epoch {epoch}/")
        for client, epoch in zip([*clients, clients[1]], (1, 1, 2), strict=True)
    )
    group = PrefixStore("a group", PrefixStore("default", old))
    group._underlying_non_prefix_store.set("exception_dump", b"1")
    assert other.check(["exception_dump"])
    assert not new.check(["exception_dump"])
    new.set("key", "value")
    assert (new.get("key"), new.add("count", 1), new.delete_key("key")) == (b"value", 1, True)
    assert not other.check(["key"])


def test_a_wait_ends_with_the_key_and_holds_nobody_up(stores: list[ControlStore]) -> None:
    first, second = stores
    with ThreadPoolExecutor(1) as pool:
        awaited = pool.submit(first.get, "late")
        assert first.add("meanwhile", 1) == 1
        second.set("late", b"here")
        assert awaited.result(timeout=HANGS_S) == b"here"


def test_a_key_that_nobody_sets_is_given_up(stores: list[ControlStore]) -> None:
    with pytest.raises(TimeoutError, match=r"timed out after 0\.1 s"):
        stores[0].wait(["never"], timedelta(seconds=0.1))


def test_a_lost_coordinator_ends_a_wait(clients: list[ControlClient], stores: list[ControlStore]) -> None:
    threading.Timer(0.1, clients[0].close).start()
    with pytest.raises((ConnectionLost, OSError)):
        stores[0].get("never")
