"""When does it compute? Requests, schedulers, coordinator, pipelines real and simulated, ledger, reports.

The Python API, `from gapless import LLM, SamplingParams, read_run`, is found here. It loads on first use, so that the
command line's help and the schedulers' tests need no torch. Import this before torch: it chooses how torch's threads
wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..parallel.openmp import choose_waiting
from . import compiled

if TYPE_CHECKING:
    from ..conf.sampling import SamplingParams as SamplingParams
    from ..conf.structured_outputs import StructuredOutputs as StructuredOutputs
    from .engine.llm import LLM as LLM
    from .engine.outputs import CompletionOutput as CompletionOutput
    from .engine.outputs import RequestOutput as RequestOutput
    from .notebook.run import Run as Run
    from .notebook.run import read_run as read_run
    from .notebook.table import Table as Table

choose_waiting()
compiled.install()

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "Run",
    "SamplingParams",
    "StructuredOutputs",
    "Table",
    "read_run",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from .engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from ..conf.sampling import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from ..conf.structured_outputs import StructuredOutputs

        return StructuredOutputs
    if name in ("RequestOutput", "CompletionOutput"):
        from .engine import outputs

        return getattr(outputs, name)
    if name in ("Run", "read_run"):
        from .notebook import run

        return getattr(run, name)
    if name == "Table":
        from .notebook.table import Table

        return Table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
