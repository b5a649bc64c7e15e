"""What a stage must compute and read for a micro-batch at least, and what its machine gives. Data only."""

from __future__ import annotations

import msgspec


class StageMachine(msgspec.Struct, frozen=True, array_like=True):
    """The rates that a rank reached alone when it started, or those of a simulated device.

    `gemm_tflops`: TFLOP/s of large GEMMs by the type of their inputs. `memory_gigabytes_per_s`: of reads from memory,
    in GB/s. Nothing and 0 where they were not measured. `slow_reason` says why the rank lacks the kernels of its
    processor; empty: it has them, or this is not known.
    """

    gemm_tflops: dict[str, float] = {}
    memory_gigabytes_per_s: float = 0.0
    slow_reason: str = ""

    @property
    def is_known(self) -> bool:
        """Whether both rates are known."""
        return bool(self.gemm_tflops) and self.memory_gigabytes_per_s > 0


class RowWork(msgspec.Struct, frozen=True, array_like=True):
    """The linear layers that all rows of a kind pass, over all ranks of a stage.

    `flops` are those of a row. `bytes` of weights are read once for a micro-batch that has such rows, and of
    `expert_bytes`, the weights of all routed experts, those of the experts that have a row.
    """

    flops: float = 0.0
    bytes: float = 0.0
    expert_bytes: float = 0.0


class AttentionLayers(msgspec.Struct, frozen=True, array_like=True):
    """Layers in which a token attends to as many others: `window`, or all before it (None).

    `chunk_layers` compute all rows of chunks, `decode_layers` those of decodes.
    """

    window: int | None
    chunk_layers: int
    decode_layers: int


class StageFloor(msgspec.Struct, frozen=True, array_like=True):
    """The work of a stage by a micro-batch's sizes (`core/micro_batch_sizes.py`), and the rates of its machine.

    All rows pass `rows`; those whose logits are computed pass `sampled` too: the LM head, and of the last layer what is
    computed of them alone. `pair_flops` are those of a query and a key in one layer, `token_bytes` those of a token's
    keys and values in one layer, both over all `ranks`. `expert_share`: the share of a layer's experts to which a token
    is routed.
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
