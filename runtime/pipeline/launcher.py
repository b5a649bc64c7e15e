"""The protocol of launchers, which start the ranks, and the lookup of a launcher by name."""

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
    """Places, starts, monitors and stops the ranks, each of which runs `run_rank` (`pipeline/rank.py`).

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
            endpoint: where the coordinator listens, with the secret that ranks need to join.
            parallel: the grid of ranks.
            hardware: what a rank runs on.
            cluster: the nodes' resources, for a launcher that chooses places.
        """
        ...

    def places(self) -> dict[int, Place]:
        """Return where each rank has started; empty if the launcher knows no more than the ranks do."""
        return {}

    @property
    def can_replace(self) -> bool:
        """Whether `replace` works under this launcher."""
        ...

    def replace(self, ranks: Collection[int], endpoint: Endpoint) -> None:
        """Kill what is left of `ranks`, and start replacements, which join at `endpoint`.

        It does not wait for them. `poll` no longer returns the old ranks.
        """
        ...

    def unplaced(self) -> set[int]:
        """Return the ranks that are being restarted but that no node has room for; empty if ranks never move."""
        return set()

    def keep(self, ranks: Sequence[int], endpoint: Endpoint, parallel: ParallelConfig) -> None:
        """Continue with `ranks` only, renumbered from 0 in their order, and stop the others.

        Each stops its work, keeps its process if it has one, and joins at `endpoint` under its new number. Called only
        if `unplaced` has returned ranks.

        Args:
            ranks: the current numbers of the ranks to keep.
            endpoint: where they join.
            parallel: the grid of the new pipeline.
        """
        raise AssertionError("each rank has a place")

    def poll(self) -> dict[int, str]:
        """Return the ranks that have exited by themselves, and how. Called at least twice per second."""
        ...

    def stop(self) -> None:
        """Stop the remaining ranks, by force if needed. May be called twice."""
        ...


def find_launcher(name: str) -> Launcher:
    """Find a launcher by its name among the installed `gapless.launchers` entry points."""
    found = {entry.name: entry for entry in entry_points(group="gapless.launchers")}
    if name not in found:
        raise ConfigError(f"parallel.launcher='{name}': unknown launcher{nearest(name, [*found, 'local'])}")
    launcher: Launcher = found[name].load()()
    return launcher


def check_launcher(parallel: ParallelConfig, hardware: HardwareConfig) -> None:
    """Check that the launcher exists and can place the ranks, as far as known before they start.

    Raises:
        ConfigError: naming the key.
    """
    if parallel.started_by != "local":
        find_launcher(parallel.started_by).check(parallel, hardware)
    elif hardware.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(f"hardware={hardware.name}: torch finds no CUDA device here; choose hardware=cpu")
