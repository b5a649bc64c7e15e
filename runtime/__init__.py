"""When does it compute? Requests, schedulers, coordinator, pipelines; simulated runs, and where the time of a run went.

Import this before torch: it chooses how torch's threads wait.
"""

from __future__ import annotations

from ..parallel.openmp import choose_waiting
from . import compiled

choose_waiting()
compiled.install()
