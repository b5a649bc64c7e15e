"""The tools that a request offers, and which of them are to be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ApiError
from .formats import NAME

_MOST = 512
Choice = Literal["auto", "required", "none"]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the client's.

    `name` is what the model calls it, with that of its `namespace` before it. `parameters` is a JSON schema; None: it
    has none. With `takes_text` the client gets the only argument as it is, without JSON.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    namespace: str = ""
    takes_text: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments, which are an object."""
        return {"type": "object", **(self.parameters or {"properties": {}})}

    @property
    def as_openai(self) -> dict[str, Any]:
        """The function as chat templates get it."""
        known = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in known.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The functions of a request.

    Args:
        functions: at least one.
        choice: whether some are called.
        named: the only one that is to be called; "": any.
        is_parallel: whether an output may have several calls.
    """

    functions: Sequence[Function]
    choice: Choice = "auto"
    named: str = ""
    is_parallel: bool = True

    @property
    def callable(self) -> list[Function]:
        """The functions that an output may call."""
        return [each for each in self.functions if self.named in ("", each.name)]

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of those, by name."""
        return {each.name: each.schema for each in self.callable}

    @property
    def has_grammar(self) -> bool:
        """Whether calls must follow their schemas."""
        return self.choice == "required" or any(each.strict for each in self.functions)


def tool_set(
    given: Mapping[str, Function], choice: object, named: str | None = None, is_parallel: bool = True
) -> ToolSet | None:
    """Return the tools of a request; None where it offers none, or wants none to be called.

    Args:
        given: functions in the request's order, by their places in the body.
        choice: none or required; else auto.
        named: the name in the choice.
        is_parallel: whether an output may have several calls.

    Raises:
        ApiError: a name is none or stands twice, a schema is of no object, or what is to be called is not there.
    """
    known: set[str] = set()
    functions = list(given.values())
    for place, function in given.items():
        if not NAME.fullmatch(function.name):
            text = "must be 1 to 64 letters, digits, dots, _ or -"
            raise ApiError(400, f"{place}.name: {text}", param=f"{place}.name")
        if function.name in known:
            raise ApiError(400, f"{place}.name: {function.name} is the name of two tools", param=f"{place}.name")
        if function.schema["type"] != "object":
            raise ApiError(400, f"{place}: the schema of its parameters must be of type object", param=place)
        known.add(function.name)
    if len(functions) > _MOST:
        raise ApiError(400, f"tools: {len(functions)} of them; {_MOST} are the most", param="tools")
    if choice == "none":
        return None
    if named and named not in known:
        raise ApiError(400, f"tool_choice: there is no tool of the name {named!r}", param="tool_choice")
    if not functions:
        if choice == "required":
            raise ApiError(400, "tool_choice: there are no tools to call", param="tool_choice")
        return None
    return ToolSet(functions, "required" if named or choice == "required" else "auto", named or "", is_parallel)
