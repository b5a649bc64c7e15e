"""The tools that a request offers, and the tool choice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from ..errors import ApiError
from .formats import NAME
from .hosted import refusal

_MOST = 512
NO_TOOLS: Mapping[str, str] = MappingProxyType({})
Choice = Literal["auto", "required", "none"]


@dataclass(frozen=True, slots=True)
class Function:
    """A client-side function.

    `name` is the name for the model, prefixed with the `namespace`. `parameters` is a JSON schema; None: no parameters.
    With `takes_text`, the client gets the only argument as plain text instead of JSON.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    namespace: str = ""
    takes_text: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments object."""
        return {"type": "object", **(self.parameters or {"properties": {}})}

    @property
    def as_openai(self) -> dict[str, Any]:
        """The function in OpenAI's form, for chat templates."""
        known = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in known.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The functions of a request.

    Args:
        functions: at least one.
        choice: the tool choice.
        named: the only function to be called; "": any.
        is_parallel: whether an output may have several calls.
        allowed: names of the functions that may be called, while the prompt lists all; None: all.
    """

    functions: Sequence[Function]
    choice: Choice = "auto"
    named: str = ""
    is_parallel: bool = True
    allowed: Collection[str] | None = None

    @property
    def callable(self) -> list[Function]:
        """The functions that an output may call."""
        allowed = self.allowed
        found = [each for each in self.functions if self.named in ("", each.name)]
        return [each for each in found if allowed is None or each.name in allowed]

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of the callable functions, by name."""
        return {each.name: each.schema for each in self.callable}

    @property
    def has_grammar(self) -> bool:
        """Whether calls must follow their schemas."""
        is_bound = self.allowed is not None or any(each.strict for each in self.functions)
        return self.choice == "required" or is_bound


def tool_set(
    given: Mapping[str, Function],
    choice: object,
    named: str | None = None,
    is_parallel: bool = True,
    hosted: Mapping[str, str] = NO_TOOLS,
    allowed: Collection[str] | None = None,
) -> ToolSet | None:
    """Return the tools of a request; None if it offers none or its choice is none.

    Args:
        given: functions in the request's order, by their places in the body.
        choice: none or required; else auto.
        named: the function named in the choice.
        is_parallel: whether an output may have several calls.
        hosted: types of the unsupported tools that the choice may name, by tool name.
        allowed: names of the tools that may be called; None: all.

    Raises:
        ApiError: a name is invalid or duplicate, a schema is not of type object, or a tool to be called is missing.
    """
    known: set[str] = set()
    functions = list(given.values())
    for place, function in given.items():
        if not NAME.fullmatch(function.name):
            text = "must be 1 to 64 letters, digits, dots, _ or -"
            raise ApiError(400, f"{place}.name: {text}", param=f"{place}.name")
        if function.name in known:
            raise ApiError(400, f"{place}.name: duplicate tool name {function.name}", param=f"{place}.name")
        if function.schema["type"] != "object":
            raise ApiError(400, f"{place}: the schema of its parameters must be of type object", param=place)
        known.add(function.name)
    if len(functions) > _MOST:
        raise ApiError(400, f"tools: {len(functions)} tools; the maximum is {_MOST}", param="tools")
    if choice == "none":
        return None
    if choice == "required" and hosted:
        raise refusal(next(iter(hosted.values())))
    if named and named not in known and named in hosted:
        raise refusal(hosted[named])
    for name in allowed or ():
        if name not in known and name not in hosted:
            raise ApiError(400, f"tool_choice: no tool is named {name!r}", param="tool_choice")
    if named and named not in known:
        raise ApiError(400, f"tool_choice: no tool is named {named!r}", param="tool_choice")
    if not functions or (allowed is not None and known.isdisjoint(allowed)):
        if choice == "required":
            raise ApiError(400, "tool_choice: no tools are available to call", param="tool_choice")
        return None
    is_forced = bool(named) or choice == "required"
    return ToolSet(functions, "required" if is_forced else "auto", named or "", is_parallel, allowed)
