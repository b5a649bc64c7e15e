"""When does it compute? Requests, schedulers, coordinator, pipelines real and simulated, ledger, reports.

The Python API, `from gapless import LLM, SamplingParams`, is found here. It loads on first use, so that the command
line's help and the schedulers' tests need no torch. Import this before torch: it chooses how torch's threads wait.
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

choose_waiting()
compiled.install()

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputs"]


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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
