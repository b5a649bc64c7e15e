"""How long layers take beside each other, where they differ: some have experts, some a window."""

from __future__ import annotations

from ...conf.architecture import Architecture, LayerKind
from ...conf.schema import HardwareConfig, ParallelConfig
from ..cost.analytic import AnalyticOperators
from ..cost.stage_costs import MicroBatchShape, StageCosts

_TYPICAL = MicroBatchShape([(192, 1024)], decodes=64, context=64 * 1024)  # of 256 tokens


def layer_times(
    arch: Architecture, parallel: ParallelConfig, hardware: HardwareConfig, dtype_bytes: int
) -> list[float] | None:
    """Return the time of each layer in means of a layer, for a micro-batch of 256 tokens; None: all are alike.

    It is that of the cost model where it knows the hardware. Elsewhere layers take as long as reading their weights,
    of which such a micro-batch needs nearly all, experts too.
    """
    kinds = arch.kinds
    if len(kinds) == 1:
        return None

    def seconds(kind: LayerKind) -> float:
        if hardware.costs is None:
            return float(arch.params_of(kind))
        operators = AnalyticOperators(
            arch, parallel.tp, hardware.costs, dtype_bytes, expert_parallel=parallel.expert_parallel, kind=kind
        )
        return StageCosts([1], [operators], host=False, last_layer="all").seconds(_TYPICAL)[0]

    each = {kind: seconds(kind) for kind in kinds}
    mean = sum(count * each[kind] for kind, count in kinds.items()) / arch.num_layers
    return [each[arch.kind(layer)] / mean for layer in range(arch.num_layers)]
