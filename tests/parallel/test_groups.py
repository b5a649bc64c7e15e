"""Groups start, close and start again in one process; a rank whose peer never joins fails in time."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist

from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous

ALONE = Rendezvous(0, 1, "", "cpu")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_single_rank_needs_no_port_and_starts_again() -> None:
    for _ in range(2):
        with Groups.start(ALONE, Mesh(1, 1), 10) as groups:
            assert (groups.tp.size(), groups.pp.size(), groups.device) == (1, 1, torch.device("cpu"))
        assert not dist.is_initialized()
    groups.close()


def test_a_failed_start_leaves_nothing_behind() -> None:
    lonely = Rendezvous(0, 2, f"tcp://127.0.0.1:{free_port()}", "cpu")
    with pytest.raises(RuntimeError):
        Groups.start(lonely, Mesh(2, 1), 1)
    assert not dist.is_initialized()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "gloo uses the interface of the address that it was given"
    with Groups.start(Rendezvous(0, 1, f"tcp://127.0.0.1:{free_port()}", "cpu"), Mesh(1, 1), 10):
        assert dist.is_initialized()
