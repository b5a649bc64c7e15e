"""Tools and the choice of them in bodies of requests, as each path words them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from .body import Body
from .tools.hosted import kind_among
from .tools.tool_set import Function


class FunctionName(Body):
    """The name of a function."""

    name: str


class FunctionSpec(FunctionName):
    """A function that the model may call."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @property
    def function(self) -> Function:
        """The function as it is written into prompts and grammars."""
        return Function(self.name, self.description, self.parameters, self.strict)


class ChatToolChoice(Body):
    """The one tool of a chat that is to be called."""

    type: Literal["function"]
    function: FunctionName


class ChatTool(ChatToolChoice):
    """A tool of a chat."""

    function: FunctionSpec


class HostedTool(Body):
    """A tool, or the choice of one, that the maker of an API runs or defines and that this server does not have."""

    type: str
    name: str | None = None


class AllowedTools(Body):
    """The tools of a request that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]

    def names(self, own: Sequence[str]) -> list[str]:
        """Return the names of the tools whose type is among `own`."""
        named = [each.get("function") or each for each in self.tools if each.get("type") in own]
        return [str(each.get("name")) for each in named if isinstance(each, dict)]

    def hosted(self, own: Sequence[str]) -> dict[str, str]:
        """Return the types of the other tools, by type."""
        kinds = [str(each.get("type")) for each in self.tools if each.get("type") not in own]
        return dict(zip(kinds, kinds, strict=True))


class ChatAllowedTools(Body):
    """Which tools of a chat may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ResponseTool(FunctionSpec):
    """A tool of `/v1/responses`: a function, or a `custom` one, whose input is a text."""

    type: Literal["function", "custom"]
    format: dict[str, Any] | None = None

    @property
    def function(self) -> Function:
        """See `FunctionSpec.function`."""
        if self.type == "function":
            return super().function
        rules = (self.format or {}).get("definition")
        of_input = {"type": "string"}
        if isinstance(rules, str):
            of_input["description"] = f"It follows this grammar:\n{rules}"
        schema = {"type": "object", "properties": {"input": of_input}, "required": ["input"]}
        return Function(self.name, self.description, schema, takes_text=True)


class ResponseNamespace(Body):
    """Tools of one name, as those of an MCP server."""

    type: Literal["namespace"]
    name: str
    tools: list[ResponseTool]


class ResponseToolChoice(FunctionName):
    """The same in `/v1/responses`."""

    type: Literal["function", "custom"]


class ResponseAllowedTools(AllowedTools):
    """Which tools of a response may be called."""

    type: Literal["allowed_tools"]


Hosted = Annotated[HostedTool, Tag("hosted")]
AnyChatTool = Annotated[Annotated[ChatTool, Tag("function")] | Hosted, Discriminator(kind_among("function"))]
AnyChatChoice = Annotated[
    Annotated[ChatToolChoice, Tag("function")] | Annotated[ChatAllowedTools, Tag("allowed_tools")] | Hosted,
    Discriminator(kind_among("function", "allowed_tools")),
]
AnyResponseTool = Annotated[
    Annotated[ResponseTool, Tag("function")]
    | Annotated[ResponseTool, Tag("custom")]
    | Annotated[ResponseNamespace, Tag("namespace")]
    | Hosted,
    Discriminator(kind_among("function", "custom", "namespace")),
]
AnyResponseChoice = Annotated[
    Annotated[ResponseToolChoice, Tag("function")]
    | Annotated[ResponseToolChoice, Tag("custom")]
    | Annotated[ResponseAllowedTools, Tag("allowed_tools")]
    | Hosted,
    Discriminator(kind_among("function", "custom", "allowed_tools")),
]
