"""`gapless` itself: `from gapless import LLM, SamplingParams, read_run`, `gapless.__version__`, `python -m gapless`.

pyproject.toml maps the package `gapless` to this folder and its subpackages to the rooms. Everything loads on first
use, so that the command line's help needs no torch. Imports are absolute here: type checkers that read the repository
see this folder in `launch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.runtime import LLM as LLM
    from gapless.runtime import CompletionOutput as CompletionOutput
    from gapless.runtime import RequestOutput as RequestOutput
    from gapless.runtime import Run as Run
    from gapless.runtime import SamplingParams as SamplingParams
    from gapless.runtime import StructuredOutputs as StructuredOutputs
    from gapless.runtime import Table as Table
    from gapless.runtime import read_run as read_run

    __version__: str

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "Run",
    "SamplingParams",
    "StructuredOutputs",
    "Table",
    "__version__",
    "read_run",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gapless")
    if name in __all__:
        from gapless import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
