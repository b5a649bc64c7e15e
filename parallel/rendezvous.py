"""The rendezvous of the ranks: all that a rank needs to connect to the others, the same under every launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A rank's number, its device, and how it finds the other ranks.

    The ranks find each other through `store`, or at `init_method` ("tcp://host:port"). A single rank needs neither.
    `host` is this rank's own address: the backend uses its interface. None leaves the choice to the backend.
    """

    rank: int
    world_size: int
    init_method: str = ""
    device: str = "cpu"  # or "cuda:0"
    store: Store | None = None
    host: str | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, self
        assert self.init_method or self.store is not None or self.world_size == 1, self
