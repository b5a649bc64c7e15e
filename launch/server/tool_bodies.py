"""Tools and tool choices in request bodies, in the format of each path."""

from __future__ import annotations

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
        """The function for prompts and grammars."""
        return Function(self.name, self.description, self.parameters, self.strict)


class ChatToolChoice(Body):
    """The tool that a chat's answer must call."""

    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.function.name


class ChatTool(ChatToolChoice):
    """A tool of a chat."""

    function: FunctionSpec


class HostedTool(Body):
    """A hosted tool, or the choice of one: run or defined by an API provider, and not available on this server."""

    type: str = ""
    name: str | None = None


class ResponseTool(FunctionSpec):
    """A tool of `/v1/responses`: a function, or a `custom` tool with a text input."""

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
    """Tools with a common prefix, such as those of an MCP server."""

    type: Literal["namespace"]
    name: str
    tools: list[ResponseTool]


class ResponseToolChoice(Body):
    """The tool that a response must call."""

    type: Literal["function", "custom"]
    name: str


Hosted = Annotated[HostedTool, Tag("<hosted>")]
_Chosen = Annotated[ChatToolChoice, Tag("<function>")]
_Named = Annotated[ResponseToolChoice, Tag("<function>")] | Annotated[ResponseToolChoice, Tag("<custom>")]


class AllowedTools(Body):
    """The tools that may be called, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: list[Any]


class AllowedChatTools(AllowedTools):
    """Allowed tools of a chat."""

    tools: list[Annotated[_Chosen | Hosted, Discriminator(kind_among("function"))]]


class ChatAllowedTools(Body):
    """The choice of allowed tools in a chat."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedChatTools


class ResponseAllowedTools(AllowedTools):
    """The choice of allowed tools in `/v1/responses`."""

    type: Literal["allowed_tools"]
    tools: list[Annotated[_Named | Hosted, Discriminator(kind_among("function", "custom"))]]


AnyChatTool = Annotated[Annotated[ChatTool, Tag("<function>")] | Hosted, Discriminator(kind_among("function"))]
AnyChatChoice = Annotated[
    _Chosen | Annotated[ChatAllowedTools, Tag("<allowed_tools>")] | Hosted,
    Discriminator(kind_among("hosted", "function", "allowed_tools")),
]
AnyResponseTool = Annotated[
    Annotated[ResponseTool, Tag("<function>")]
    | Annotated[ResponseTool, Tag("<custom>")]
    | Annotated[ResponseNamespace, Tag("<namespace>")]
    | Hosted,
    Discriminator(kind_among("function", "custom", "namespace")),
]
AnyResponseChoice = Annotated[
    _Named | Annotated[ResponseAllowedTools, Tag("<allowed_tools>")] | Hosted,
    Discriminator(kind_among("hosted", "function", "custom", "allowed_tools")),
]
