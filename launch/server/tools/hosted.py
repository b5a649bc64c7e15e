"""Hosted tools, run or defined by the API provider, which this server does not have: left out or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ApiError


def _libraries(kind: str) -> str:
    name = kind.title().replace("_", "")
    return f"OpenAI Agents: no {name}Tool; AI SDK: no openai.tools.{name[0].lower()}{name[1:]}"


_DENY = 'Claude Code: "deny": ["%s"] in the permissions of its settings'
_OWN = "offer it as a tool of your own, with an input_schema"
_OF_OPENAI = "file_search code_interpreter image_generation local_shell shell apply_patch tool_search"
_SWITCHES = {  # how clients disable a tool, by prefix of its type
    "web_search": f'Codex: web_search = "disabled" in config.toml; {_DENY % "WebSearch"}; {_libraries("web_search")}',
    "web_fetch": _DENY % "WebFetch",
    "custom": "offer it as a function; /v1/responses takes tools of this type",
    "computer": "OpenAI Agents: no ComputerTool",
    "mcp": "OpenAI Agents: MCPServerStreamableHttp or MCPServerStdio, which the client runs, instead of HostedMCPTool",
    **{kind: _libraries(kind) for kind in _OF_OPENAI.split()},
    **dict.fromkeys(("bash_", "text_editor_", "memory_"), _OWN),
}
ITEMS = (  # /v1/responses items that hosted tools leave in a conversation
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"),
    *("computer_call_output", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("apply_patch_call", "apply_patch_call_output", "tool_search_call", "tool_search_output"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
)


def is_block(kind: str) -> bool:
    """Return whether hosted tools leave blocks of this type in Anthropic's messages."""
    return kind in ("server_tool_use", "mcp_tool_use") or (kind.endswith("_tool_result") and kind != "tool_result")


def kind_among(*own: str) -> Callable[[Any], str]:
    """Return a discriminator of tools or tool choices: one of `own`, else `hosted`, in brackets unlike any field.

    An item without a type gets the first of `own`, whose class reports what is missing.
    """

    def kind_of(given: Any) -> str:
        kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
        return f"<{kind if kind in own else 'hosted' if isinstance(kind, str) else own[0]}>"

    return kind_of


def no_message(field: str) -> ApiError:
    """Return the error for a conversation that is empty without the items of hosted tools."""
    text = "items of tools that this server does not have are ignored"
    return ApiError(400, f'{field}: must have a message, such as {{"role": "user", ...}}; {text}', param=field)


def refusal(kind: str) -> ApiError:
    """Return the error for a request that forces a call of a hosted tool."""
    switch = next((text for begin, text in _SWITCHES.items() if kind.startswith(begin)), "remove it from tools")
    text = f"tool_choice: this server has no {kind} tool; use auto, or disable it in the client: {switch}"
    return ApiError(400, text, param="tool_choice")
