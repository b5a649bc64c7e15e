"""The protocol of a launcher, which starts the ranks, and the search for a launcher by its name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import entry_points
from typing import Protocol

from ...conf.clusters import ClusterConfig
from ...conf.errors import ConfigError, nearest
from ...conf.schema import HardwareConfig, ParallelConfig
from ...parallel.control import Endpoint
from ...parallel.real_placement import Place


class Launcher(Protocol):
    """Places, starts, watches and stops the ranks, each of which runs `run_rank` (`pipeline/rank.py`).

    Micro-batches never pass through it.
    """

    def check(self, parallel: ParallelConfig, hardware: HardwareConfig) -> None:
        """Raise `ConfigError` if the ranks cannot be placed, before anything heavy starts."""
        ...

    def start(
        self, endpoint: Endpoint, parallel: ParallelConfig, hardware: HardwareConfig, cluster: ClusterConfig
    ) -> None:
        """Start all ranks without waiting for them; they join the coordinator at `endpoint`.

        Args:
            endpoint: where the coordinator listens, with the secret that lets ranks in.
            parallel: the grid of ranks.
            hardware: what a rank runs on.
            cluster: what nodes hold, for a launcher that chooses places.
        """
        ...

    def places(self) -> dict[int, Place]:
        """Return where each rank has started; nothing where the launcher knows no more than the ranks do."""
        return {}

    @property
    def can_replace(self) -> bool:
        """Whether `replace` works under this launcher."""
        ...

    def replace(self, ranks: Collection[int], endpoint: Endpoint) -> None:
        """End what is left of `ranks` by force, and start others in their place, which join at `endpoint`.

        It does not wait for them. `poll` does not return the old ones any more.
        """
        ...

    def unplaced(self) -> set[int]:
        """Return the ranks that are being started again and for which no node has room; none if each stays in place."""
        return set()

    def keep(self, ranks: Sequence[int], endpoint: Endpoint, parallel: ParallelConfig) -> None:
        """Go on with `ranks` alone, numbered from 0 in their order, and end the others.

        Each ends what it does, keeps its process where it has one, and joins at `endpoint` as its new number. It is
        called only where `unplaced` has returned some ranks.

        Args:
            ranks: their present numbers.
            endpoint: where they join.
            parallel: of the pipeline that they make.
        """
        raise AssertionError("each rank has a place")

    def poll(self) -> dict[int, str]:
        """Return the ranks that have ended by themselves, and how. It is called twice a second and more."""
        ...

    def stop(self) -> None:
        """End the ranks that are left, by force if need be. May be called twice."""
        ...


def find_launcher(name: str) -> Launcher:
    """Find a launcher by its name among the installed `gapless.launchers` entry points."""
    found = {entry.name: entry for entry in entry_points(group="gapless.launchers")}
    if name not in found:
        raise ConfigError(f"parallel.launcher='{name}': unknown launcher{nearest(name, [*found, 'local'])}")
    launcher: Launcher = found[name].load()()
    return launcher


def check_launcher(parallel: ParallelConfig, hardware: HardwareConfig) -> None:
    """Check that the launcher exists and can place the ranks, as far as is known before they start.

    Raises:
        ConfigError: naming the key.
    """
    if parallel.started_by != "local":
        find_launcher(parallel.started_by).check(parallel, hardware)
    elif hardware.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(f"hardware={hardware.name}: torch finds no CUDA device here; choose hardware=cpu")
