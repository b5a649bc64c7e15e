"""The runtime: requests, schedulers, coordinator, pipelines, simulation, and analysis of runs.

Import this before torch: it chooses how torch's threads wait.
"""

from __future__ import annotations

from ..parallel.openmp import choose_waiting
from . import compiled

choose_waiting()
compiled.install()
