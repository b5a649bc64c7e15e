"""The least FLOPs and bytes of a stage per micro-batch, and its machine's rates (a roofline). Data only."""

from __future__ import annotations

from typing import Literal

import msgspec

LastLayer = Literal["sampled", "all"]  # the rows that the model's last layer computes


class StageMachine(msgspec.Struct, frozen=True, array_like=True):
    """The rates of a rank, measured alone at startup, or of a simulated device.

    `gemm_tflops`: TFLOP/s of large GEMMs, by input dtype. `memory_gigabytes_per_s`: memory read bandwidth, in GB/s.
    Empty and 0 if not measured. `slow_reason`: why the rank lacks the kernels for its processor; empty if it has them
    or if this is not known.
    """

    gemm_tflops: dict[str, float] = {}
    memory_gigabytes_per_s: float = 0.0
    slow_reason: str = ""

    @property
    def is_known(self) -> bool:
        """Whether both rates are known."""
        return bool(self.gemm_tflops) and self.memory_gigabytes_per_s > 0


class RowWork(msgspec.Struct, frozen=True, array_like=True):
    """The linear layers for one kind of rows, over all ranks of a stage.

    `flops` are per row. `bytes` of weights are read once per micro-batch with such rows. `expert_bytes` are the weights
    of all routed experts, of which a micro-batch reads only the experts that its rows are routed to.
    """

    flops: float = 0.0
    bytes: float = 0.0
    expert_bytes: float = 0.0


class AttentionLayers(msgspec.Struct, frozen=True, array_like=True):
    """Layers with the same attention window: `window` tokens, or all previous ones (None).

    `chunk_layers` compute all rows of chunks, `decode_layers` all rows of decodes.
    """

    window: int | None
    chunk_layers: int
    decode_layers: int


class StageFloor(msgspec.Struct, frozen=True, array_like=True):
    """The work of a stage as a function of micro-batch sizes (`core/micro_batch_sizes.py`), and its machine's rates.

    `rows` applies to all rows. `sampled` applies to rows whose logits are computed: the LM head, and the part of the
    last layer that is computed for them only. `pair_flops` are per (query, key) pair and layer, `token_bytes` per
    token's KV and layer, both over all `ranks`. `expert_share`: the share of a layer's experts that a token is routed
    to.
    """

    machine: StageMachine
    ranks: int
    rows: RowWork
    sampled: RowWork
    pair_flops: float
    token_bytes: float
    attention: list[AttentionLayers]
    expert_share: float = 0.0

    @property
    def flops_per_s(self) -> float:
        """The GEMM rate of all ranks together, in FLOP/s."""
        return 1e12 * self.ranks * max(self.machine.gemm_tflops.values())

    @property
    def bytes_per_s(self) -> float:
        """The memory bandwidth of all ranks together, in bytes/s."""
        return 1e9 * self.ranks * self.machine.memory_gigabytes_per_s
