"""Messages between the coordinator and the ranks, except micro-batches."""

from __future__ import annotations

import msgspec

from ...models.stage_spec import StageSpec
from ...parallel.mesh import Mesh
from ..core.messages import Compile, Compiled, MicroBatchMessage, MicroBatchResult, RankFailure, Stop
from ..core.stage_floor import StageMachine


class Setup(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """What the ranks need to build their stages and to join each other."""

    stages: list[StageSpec]
    tp: int
    depth: int
    threads: int | None  # per rank; None: an equal share of the node's cores among its ranks
    timeout_s: float  # torch's timeout for a rank; the coordinator's is shorter
    node_ranks: list[int] = []  # by rank: number of ranks on its node
    tokenizer: str | None = None  # path; None: UTF-8 bytes
    epoch: int = 0  # of the pipeline that the rank joins

    @property
    def pp(self) -> int:
        """The number of stages."""
        return len(self.stages)

    @property
    def num_blocks(self) -> int:
        """KV blocks of each stage."""
        return self.stages[0].num_blocks

    @property
    def num_groups(self) -> int:
        """The number of layer groups, each with its own block tables."""
        return len(self.stages[0].windows)

    def mesh(self, rank: int) -> Mesh:
        """Return a rank's place in the grid."""
        return Mesh(self.pp, self.tp, rank)

    def stage(self, rank: int) -> StageSpec:
        """Return the stage of a rank."""
        return self.stages[self.mesh(rank).stage]


class Halt(msgspec.Struct, frozen=True, array_like=True, tag="halt"):
    """The pipeline has failed: a rank stops its work, disconnects from the other ranks, and waits for `Rejoin`."""


class Rejoin(msgspec.Struct, frozen=True, array_like=True, tag="rejoin"):
    """A rank reconnects to the others, keeps its weights, and clears its KV cache. It replies with `Ready`."""

    epoch: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """A rank has joined an epoch's pipeline and built its stage.

    It runs on the node `host`; `process` is its process and device. `rendezvous_s` is the time to connect to the other
    ranks, in seconds. `fallback_reason` comes from its `Kernels`, `is_slow` from its `Stage`. `attention` names the
    attention backend and why it was chosen; empty on a CPU. `machine` is the measured performance of its device.
    """

    rank: int
    host: str
    process: str
    epoch: int = 0
    rendezvous_s: float = 0.0
    fallback_reason: str = ""
    attention: str = ""
    is_slow: bool = False
    machine: StageMachine = StageMachine()


class StartPart(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """A part of a rank's startup has finished or, if not `is_done`, is still running, after `seconds`."""

    rank: int
    part: str
    seconds: float
    is_done: bool


class RollCall(msgspec.Struct, frozen=True, array_like=True, tag="roll_call"):
    """Health check of each rank when the pipeline hangs; ranks reply with `Present`."""


class Present(msgspec.Struct, frozen=True, array_like=True, tag="present"):
    """A rank's reply to a roll call, and its sign that it is rejoining."""

    rank: int


encoder = msgspec.msgpack.Encoder()
to_rank = msgspec.msgpack.Decoder(Setup | Halt | Rejoin | MicroBatchMessage | Compile | RollCall | Stop)
from_rank = msgspec.msgpack.Decoder(Ready | StartPart | MicroBatchResult | Compiled | Present | RankFailure)
