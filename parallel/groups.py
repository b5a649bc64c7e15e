"""A rank's process groups: the one file that starts torch.distributed and Megatron's parallel state, and ends them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from datetime import timedelta
from types import TracebackType
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from .megatron import parallel_state
from .mesh import Mesh
from .rendezvous import Rendezvous

_SIOCGIFADDR = 0x8915


class Groups:
    """The groups that this rank belongs to: `tp` (its stage) and `pp` (the same slice of every stage)."""

    def __init__(
        self, mesh: Mesh, device: torch.device, tp: dist.ProcessGroup, pp: dist.ProcessGroup, *, owned: bool = True
    ) -> None:
        self._owned = owned
        self.mesh = mesh
        self.device = device
        self.tp = tp
        self.pp = pp

    @classmethod
    def start(cls, rendezvous: Rendezvous, mesh: Mesh, timeout_s: float) -> Groups:
        """Meet the other ranks; every rank of the mesh calls this at once.

        Gloo on CPUs, NCCL on GPUs. `timeout_s` bounds the meeting and every collective after it.

        Raises:
            RuntimeError: the others did not come in time (torch's `DistStoreError` and its like).
        """
        assert (mesh.rank, mesh.world_size) == (rendezvous.rank, rendezvous.world_size), (mesh, rendezvous)
        device = torch.device(rendezvous.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if mesh.world_size == 1 and parallel_state.model_parallel_is_initialized():
            # A second model in this process; a group of one never talks, so it matters not who made it.
            world = dist.group.WORLD
            assert world is not None
            assert world.size() == 1, "this process is a rank of a larger mesh"
            return cls(mesh, device, world, world, owned=False)
        timeout = timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = rendezvous.store
        if store is None and not rendezvous.init_method:
            store = dist.HashStore()
        _bind_to(rendezvous.host or urlsplit(rendezvous.init_method).hostname or "127.0.0.1")
        try:
            dist.init_process_group(
                backend, init_method=rendezvous.init_method or None, store=store, rank=mesh.rank,
                world_size=mesh.world_size, timeout=timeout,
            )
            parallel_state.initialize_model_parallel(
                mesh.tp, mesh.pp, create_gloo_process_groups=False, distributed_timeout_minutes=timeout_s / 60
            )
        except BaseException:
            _destroy()
            raise
        tp, pp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
        assert dist.get_process_group_ranks(tp) == mesh.tp_groups[mesh.stage], mesh
        assert dist.get_process_group_ranks(pp) == mesh.pp_groups[mesh.tp_rank], mesh
        return cls(mesh, device, tp, pp)

    def close(self) -> None:
        """Leave the groups; this process may `start` again, with another mesh. May be called twice."""
        if self._owned:
            _destroy()

    def __enter__(self) -> Groups:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _destroy() -> None:
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _bind_to(host: str) -> None:
    """Gloo and NCCL talk on the interface of this address, not on the one that this machine's name resolves to.

    For as long as this process lives: NCCL reads it only when a communicator is first used.
    """
    if interface := interface_of(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def interface_of(host: str) -> str | None:
    """The network interface of this machine that holds an IPv4 address; None if there is none, or not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    address = socket.gethostbyname(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
