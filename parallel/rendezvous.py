"""Where a rank meets the others: its number, the meeting point and its device, the same under every launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The ranks meet through `store`, or at `init_method` ("tcp://host:port"); a single rank needs neither.

    `host` is this rank's own address, on whose interface it talks to the others; None leaves the choice to the backend.
    """

    rank: int
    world_size: int
    init_method: str = ""
    device: str = "cpu"  # "cuda:0"
    store: Store | None = None
    host: str | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, self
        assert self.init_method or self.store is not None or self.world_size == 1, self
