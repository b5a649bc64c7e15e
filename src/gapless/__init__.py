"""`gapless` itself: `from gapless import LLM, SamplingParams, read_run`, `gapless.__version__`, `python -m gapless`.

The rooms beside this file are links to those at the root of the repository. Everything loads on first use, so that the
command line's help needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conf.sampling import SamplingParams as SamplingParams
    from .conf.structured_outputs import StructuredOutputs as StructuredOutputs
    from .models.chat_template import Conversation as Conversation
    from .runtime.analysis.notebook.run import Run as Run
    from .runtime.analysis.notebook.run import read_run as read_run
    from .runtime.analysis.notebook.table import Table as Table
    from .runtime.engine.llm import LLM as LLM
    from .runtime.engine.outputs import CompletionOutput as CompletionOutput
    from .runtime.engine.outputs import RequestOutput as RequestOutput

    __version__: str

_MODULES = {
    "LLM": "runtime.engine.llm",
    "CompletionOutput": "runtime.engine.outputs",
    "Conversation": "models.chat_template",
    "RequestOutput": "runtime.engine.outputs",
    "Run": "runtime.analysis.notebook.run",
    "SamplingParams": "conf.sampling",
    "StructuredOutputs": "conf.structured_outputs",
    "Table": "runtime.analysis.notebook.table",
    "read_run": "runtime.analysis.notebook.run",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gapless")
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"gapless.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
