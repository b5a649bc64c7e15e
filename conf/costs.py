"""Constants of the analytic cost model for one kind of device; `conf/hardware/*.yaml` names the source of each."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .errors import check


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsConfig:
    """A tiled roofline. Rates are what kernels reach, not what the data sheet says."""

    matmul_tflops: float  # dense, at full tiles
    memory_gbps: float  # of the device's own memory
    launch_us: float = 5.0  # least time of a kernel
    tile: int = 128  # rows that a matmul is padded to
    node_gbps: float = 200.0  # a rank's to its peers in the node
    network_gbps: float = 20.0  # a rank's to another node
    message_us: float = 20.0  # least time of a message or a collective

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            check(f"hardware.costs.{field.name}", value, value > 0, "above 0")
