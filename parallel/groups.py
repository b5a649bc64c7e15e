"""A rank's process groups. Only this file initializes and destroys torch.distributed and Megatron's parallel state."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from datetime import timedelta
from types import TracebackType
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.cpp_library import ELEMENTS
from . import nccl
from .megatron import parallel_state
from .mesh import Mesh
from .rendezvous import Rendezvous
from .shared_memory import SharedMemory

_SIOCGIFADDR = 0x8915  # Linux's ioctl request for an interface's address
_ABORT_S = 5.0  # limit for NCCL to abort all communicators
_HEARING_S = 2.0  # in which `abort` should follow `end`


class Groups:
    """The groups of this rank: `tp` has the ranks of its stage, `pp` the ranks with its tp rank, one per stage.

    A group's connections stay open as long as it is referenced, so no other object keeps a reference.
    """

    def __init__(
        self, mesh: Mesh, device: torch.device, tp: dist.ProcessGroup, pp: dist.ProcessGroup, *, owned: bool = True
    ) -> None:
        self._owned = owned
        self.mesh = mesh
        self.device = device
        self._connected: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = (tp, pp)
        self._shared: SharedMemory | None = None
        self._starting = threading.Lock()
        self._aborting: threading.Thread | None = None
        self._may_abort = threading.Event()  # no CUDA graph uses a communicator any more

    @property
    def tp(self) -> dist.ProcessGroup:
        """The group of this stage's ranks. Valid only while connected."""
        assert self._connected is not None
        return self._connected[0]

    @property
    def pp(self) -> dist.ProcessGroup:
        """The group of all stages' ranks with this tp rank. Valid only while connected."""
        assert self._connected is not None
        return self._connected[1]

    @classmethod
    def start(cls, rendezvous: Rendezvous, mesh: Mesh, timeout_s: float) -> Groups:
        """Connect with the other ranks. Every rank of the mesh must call this at the same time.

        The backend is gloo on CPUs and NCCL on GPUs. `timeout_s` bounds the start and each later collective.

        Raises:
            RuntimeError: another rank did not join in time (torch raises `DistStoreError`, among others).
        """
        assert (mesh.rank, mesh.world_size) == (rendezvous.rank, rendezvous.world_size), (mesh, rendezvous)
        device = torch.device(rendezvous.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if mesh.world_size == 1 and parallel_state.model_parallel_is_initialized():
            # This process already has a model. Groups of one rank never communicate, so both models can share them.
            world = dist.group.WORLD
            assert world is not None
            assert world.size() == 1, "this process is a rank of a larger mesh"
            return cls(mesh, device, world, world, owned=False)
        groups = cls(mesh, device, *cls._connect(rendezvous, mesh, device, timeout_s))
        groups._meet(timeout_s)
        return groups

    def restart(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Reconnect after some ranks have been replaced: like `start`, in place."""
        assert self._owned
        self.close()
        self._may_abort.clear()
        self._connected = self._connect(rendezvous, self.mesh, self.device, timeout_s)
        self._meet(timeout_s)

    def _meet(self, timeout_s: float) -> None:
        """Open shared memory within the stage, on a CPU, and exchange a message with each rank that this one talks to.

        NCCL connects two ranks at their first message, and blocks meanwhile. Stages take turns, so that no stage waits
        for more than its neighbours.
        """
        if self.mesh.tp > 1 and self.device.type == "cpu":
            self._shared = SharedMemory.open(self.tp, timeout_s)
        mesh, word, heard = self.mesh, *torch.zeros(2, 1, device=self.device)
        for is_send in (False, True) if mesh.stage % 2 else (True, False):
            if is_send and not mesh.is_last:
                dist.send(word, dst=mesh.next, group=self.pp)
            elif not is_send and not mesh.is_first:
                dist.recv(heard, src=mesh.previous, group=self.pp)
        if self.device.type == "cuda":
            self.all_reduce(word)
            torch.cuda.synchronize(self.device)

    def end(self) -> None:
        """Make collectives that wait for other ranks fail. Any thread may call it; another must then call `abort`.

        On gloo a send or receive fails when the other rank closes its groups. NCCL's communicators are aborted once
        `abort` is called, or after 2 s, since that thread may itself be waiting for the device.
        """
        if self._shared is not None:
            self._shared.end()
        if self.device.type == "cuda" and self._owned:
            self._start_abort()

    def abort(self) -> None:
        """Destroy the groups without the other ranks. CUDA graphs that captured a collective must have been dropped.

        Raises:
            RuntimeError: NCCL did not abort in time. This process cannot join another rank again.
        """
        if self.device.type == "cuda" and self._owned:
            self._may_abort.set()
            aborting = self._start_abort()
            aborting.join(_ABORT_S)
            if aborting.is_alive() or dist.is_initialized():
                raise RuntimeError(f"NCCL did not abort its communicators within {_ABORT_S:g} s")
        self.close()

    def _start_abort(self) -> threading.Thread:
        with self._starting:
            if self._aborting is None or not self._aborting.is_alive():
                self._aborting = threading.Thread(target=self._abort, name="abort", daemon=True)
                self._aborting.start()
            return self._aborting

    def _abort(self) -> None:
        self._may_abort.wait(_HEARING_S)
        torch.cuda.set_device(self.device)
        if dist.is_initialized():
            if self._connected is not None:  # first: no graph uses it, and the device may wait for it
                dist.distributed_c10d._abort_process_group(self.pp)
            dist.distributed_c10d._abort_process_group()

    @staticmethod
    def _connect(
        rendezvous: Rendezvous, mesh: Mesh, device: torch.device, timeout_s: float
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        timeout = timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = rendezvous.store
        if store is None and not rendezvous.init_method:
            store = dist.HashStore()
        _bind_to(rendezvous.host or urlsplit(rendezvous.init_method).hostname or "127.0.0.1")
        if backend == "nccl":
            os.environ |= nccl.VARIABLES
        try:
            dist.init_process_group(
                backend,
                init_method=rendezvous.init_method or None,
                store=store,
                rank=mesh.rank,
                world_size=mesh.world_size,
                timeout=timeout,
            )
            with nccl.group_options() if backend == "nccl" else contextlib.nullcontext() as options:
                parallel_state.initialize_model_parallel(
                    mesh.tp,
                    mesh.pp,
                    create_gloo_process_groups=False,
                    distributed_timeout_minutes=timeout_s / 60,
                    nccl_communicator_config_path=options,
                )
        except BaseException:
            _destroy()
            raise
        tp, pp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
        assert dist.get_process_group_ranks(tp) == mesh.tp_groups[mesh.stage], mesh
        assert dist.get_process_group_ranks(pp) == mesh.pp_groups[mesh.tp_rank], mesh
        return tp, pp

    @property
    def shared(self) -> SharedMemory | None:
        """The shared memory of this stage's tensor-parallel ranks; None if they have none, or tp is 1."""
        return self._shared

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x`, which must be contiguous, over the ranks of the stage, in place."""
        assert x.is_contiguous()
        if self._shared is not None and x.dtype in ELEMENTS:
            return self._shared.all_reduce(x)
        if self.mesh.tp > 1:
            dist.all_reduce(x, group=self.tp)
        return x

    def all_gather(self, x_RV: Tensor) -> Tensor:
        """Return the stage's [R, V] tensors concatenated along the columns, [R, tp * V]."""
        if self.mesh.tp == 1 or not len(x_RV):
            return x_RV if self.mesh.tp == 1 else x_RV.new_empty(0, self.mesh.tp * x_RV.shape[1])
        if self._shared is not None and x_RV.shape[1] * x_RV.itemsize % 4 == 0:
            return self._shared.gather(x_RV, [range(len(x_RV))], 0)
        R, V = x_RV.shape
        parts = x_RV.new_empty(self.mesh.tp * R, V)
        dist.all_gather_into_tensor(parts, x_RV.contiguous(), group=self.tp)
        return parts.view(self.mesh.tp, R, V).transpose(0, 1).reshape(R, self.mesh.tp * V)

    def deal_rows(self, x_RV: Tensor) -> Tensor:
        """Return this rank's rows (`Mesh.share_of`) of the `all_gather` result, [share, tp * V].

        This is an all-to-all: a rank receives only its own rows' columns, except over gloo.
        """
        mesh, (R, V) = self.mesh, x_RV.shape
        if mesh.tp == 1:
            return x_RV
        shares = [mesh.share_of(R, each) for each in range(mesh.tp)]
        own = shares[mesh.tp_rank]
        if self._shared is not None and V * x_RV.itemsize % 4 == 0:
            return self._shared.gather(x_RV, shares, mesh.tp_rank)
        if self.device.type == "cpu":
            return self.all_gather(x_RV)[own.start : own.stop]
        parts = x_RV.new_empty(mesh.tp * len(own), V)
        dist.all_to_all_single(parts, x_RV.contiguous(), [len(own)] * mesh.tp, list(map(len, shares)), group=self.tp)
        return parts.view(mesh.tp, len(own), V).transpose(0, 1).reshape(len(own), mesh.tp * V)

    def close(self) -> None:
        """Destroy the groups. A second call does nothing. This process may then `start` again, with another mesh."""
        if self._owned:
            self._shared = self._connected = None
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
    """Make gloo and NCCL use the network interface with the address `host`, not the default by hostname.

    The setting stays for the lifetime of the process, since NCCL reads it only when a communicator is first used.
    """
    if interface := interface_of(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def interface_of(host: str) -> str | None:
    """Return the network interface of this machine that has the IPv4 address of `host`.

    None: no interface has it, or the system is not Linux.
    """
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
