"""Tools and the choice of them in bodies of requests, as each path words them."""

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
        """The function as it is written into prompts and grammars."""
        return Function(self.name, self.description, self.parameters, self.strict)


class ChatToolChoice(Body):
    """The one tool of a chat that is to be called."""

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
    """A tool, or the choice of one, that the maker of an API runs or defines and that this server does not have."""

    type: str = ""
    name: str | None = None


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


class ResponseToolChoice(Body):
    """The same in `/v1/responses`."""

    type: Literal["function", "custom"]
    name: str


Hosted = Annotated[HostedTool, Tag("<hosted>")]
_Chosen = Annotated[ChatToolChoice, Tag("<function>")]
_Named = Annotated[ResponseToolChoice, Tag("<function>")] | Annotated[ResponseToolChoice, Tag("<custom>")]


class AllowedTools(Body):
    """The tools of a request that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: list[Any]


class AllowedChatTools(AllowedTools):
    """Those of a chat."""

    tools: list[Annotated[_Chosen | Hosted, Discriminator(kind_among("function"))]]


class ChatAllowedTools(Body):
    """Which tools of a chat may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedChatTools


class ResponseAllowedTools(AllowedTools):
    """Which tools of a response may be called."""

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
