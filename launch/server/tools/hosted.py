"""Tools that the maker of an API runs or defines, which this server does not have: left out, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ApiError

_SWITCHES = {  # how clients turn a tool off, by what its type begins with
    "web_search": 'Codex: web_search = "disabled" in config.toml; Claude Code: "deny": ["WebSearch"] in the permissions '
    "of settings.json; OpenAI Agents: no WebSearchTool",
    "web_fetch": 'Claude Code: "deny": ["WebFetch"] in the permissions of settings.json',
    "file_search": "OpenAI Agents: no FileSearchTool",
    "code_interpreter": "OpenAI Agents: no CodeInterpreterTool",
    "computer": "OpenAI Agents: no ComputerTool",
    "image_generation": "OpenAI Agents: no ImageGenerationTool",
    "mcp": "OpenAI Agents: MCPServerStreamableHttp or MCPServerStdio, which the client runs, for HostedMCPTool",
    "local_shell": "OpenAI Agents: no LocalShellTool",
    "shell": "OpenAI Agents: no ShellTool",
    "apply_patch": "OpenAI Agents: no ApplyPatchTool",
    "tool_search": "OpenAI Agents: no ToolSearchTool",
    **dict.fromkeys(("bash_", "text_editor_", "memory_"), "offer it as a tool of your own, with an input_schema"),
}


def kind_of(tool: Any, own: Sequence[str]) -> str:
    """Return the type of a tool, or of a choice of one, if it is among `own`; else `hosted`.

    What has no type is of the first of `own`, whose class then says what is missing.
    """
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return kind if kind in own else "hosted" if isinstance(kind, str) else own[0]


def refuse(kind: str) -> ApiError:
    """Return the answer to a request that forces a call of a hosted tool."""
    switch = next((text for begin, text in _SWITCHES.items() if kind.startswith(begin)), "leave it out of tools")
    return ApiError(400, f"tool_choice: this server has no {kind} tool; switch it off ({switch})", param="tool_choice")
