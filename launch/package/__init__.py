"""`gapless` itself: `from gapless import LLM, SamplingParams, read_run`, `gapless.__version__`, `python -m gapless`.

pyproject.toml maps the package `gapless` to this folder and its subpackages to the rooms. Everything loads on first
use, so that the command line's help needs no torch. Imports are absolute here: type checkers that read the repository
see this folder in `launch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.conf.sampling import SamplingParams as SamplingParams
    from gapless.conf.structured_outputs import StructuredOutputs as StructuredOutputs
    from gapless.models.chat_template import Conversation as Conversation
    from gapless.runtime.engine.llm import LLM as LLM
    from gapless.runtime.engine.outputs import CompletionOutput as CompletionOutput
    from gapless.runtime.engine.outputs import RequestOutput as RequestOutput
    from gapless.runtime.notebook.run import Run as Run
    from gapless.runtime.notebook.run import read_run as read_run
    from gapless.runtime.notebook.table import Table as Table

    __version__: str

_MODULES = {
    "LLM": "runtime.engine.llm",
    "CompletionOutput": "runtime.engine.outputs",
    "Conversation": "models.chat_template",
    "RequestOutput": "runtime.engine.outputs",
    "Run": "runtime.notebook.run",
    "SamplingParams": "conf.sampling",
    "StructuredOutputs": "conf.structured_outputs",
    "Table": "runtime.notebook.table",
    "read_run": "runtime.notebook.run",
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
