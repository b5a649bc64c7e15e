"""Messages between the coordinator and the ranks beside the micro-batches."""

from __future__ import annotations

import msgspec

from ...conf.architecture import Architecture
from ...conf.schema import ModelConfig
from ...models.block_groups import ONE_TABLE, Windows
from ..core.messages import Compile, Compiled, MicroBatchMessage, MicroBatchResult, RankFailure, Stop
from ..core.stage_floor import StageMachine


class Setup(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """What a rank needs to build its stage. `layers[s]` is the half-open range of the layers of stage s."""

    pp: int
    tp: int
    model: ModelConfig
    arch: Architecture
    layers: list[tuple[int, int]]
    depth: int
    num_blocks: int
    block_size: int
    replicate_embedding: bool
    seed: int
    threads: int | None  # of a rank; None: its share of the cores among `node_ranks`
    timeout_s: float  # after which torch gives up on a rank; the coordinator does so earlier
    node_ranks: list[int] = []  # by rank: how many ranks share its node
    tokenizer: str | None = None  # its path; None: UTF-8 bytes
    epoch: int = 0  # of the pipeline that the rank joins
    cache_dtype: str = "auto"
    expert_parallel: bool = False  # each rank of a stage holds whole experts
    windows: Windows = ONE_TABLE  # of the groups of layers that have block tables of their own


class Halt(msgspec.Struct, frozen=True, array_like=True, tag="halt"):
    """Has a rank drop what it does, let go of the other ranks, and wait for `Rejoin`: the pipeline has failed."""


class Rejoin(msgspec.Struct, frozen=True, array_like=True, tag="rejoin"):
    """Has a rank connect with the others anew, keep its weights, and empty its cache. It answers with `Ready`."""

    epoch: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """A rank has joined the pipeline of an epoch and built its stage, in `process` (and its device) on the node `host`.

    `rendezvous_s` are the seconds that it took to connect with the other ranks. `fallback_reason` is that of its
    `Kernels`. `attention` says which backend computes attention and why; empty on a CPU. `is_slow` is that of its
    `Stage`. `machine` is what its device gives.
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
    """A part of a rank's start has ended, or goes on where `is_done` is false, after `seconds` of it."""

    rank: int
    part: str
    seconds: float
    is_done: bool


class RollCall(msgspec.Struct, frozen=True, array_like=True, tag="roll_call"):
    """Asks each rank to say that it is there, when the pipeline hangs."""


class Present(msgspec.Struct, frozen=True, array_like=True, tag="present"):
    """A rank's answer to a roll call."""

    rank: int


encoder = msgspec.msgpack.Encoder()
to_rank = msgspec.msgpack.Decoder(Setup | Halt | Rejoin | MicroBatchMessage | Compile | RollCall | Stop)
from_rank = msgspec.msgpack.Decoder(Ready | StartPart | MicroBatchResult | Compiled | Present | RankFailure)
