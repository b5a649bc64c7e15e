"""Converts the input of `/v1/responses` to chat messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .errors import ApiError, given
from .tools.hosted import ITEMS, no_message

_ITEMS = (
    *("message", "reasoning", "function_call", "function_call_output"),
    *("custom_tool_call", "custom_tool_call_output"),
)


def response_messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a conversation. Reasoning, text and calls of one assistant turn form one message.

    Items of tools that this server does not have are left out.

    Raises:
        ApiError: an item has an unsupported type or lacks a key, or no item is left.
    """
    found: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where, kind = f"input[{number}]", item.get("type") or "message"
        if kind in ITEMS:
            continue
        if kind not in _ITEMS:
            raise ApiError(400, f"{where}: {kind} items are not supported; use {', '.join(_ITEMS)}", param=where)
        if kind == "message":
            if item.get("content") is None:
                raise ApiError(400, f"{where}.content: required", param=f"{where}.content")
            message = {key: item[key] for key in item if key not in ("type", "id", "status", "phase")}
            turn = _turn(found) if item.get("role") == "assistant" else None
            if turn is None or turn["content"] is not None or turn.get("tool_calls"):
                found.append(message)
            else:
                turn.update(message)
        elif kind.endswith("_output"):
            output = given(item, "output", (str, list), where)
            found.append({"role": "tool", "tool_call_id": given(item, "call_id", str, where), "content": output})
        else:
            turn = _turn(found)
            if turn is None or (kind == "reasoning" and (turn["content"] is not None or turn.get("tool_calls"))):
                turn = {"role": "assistant", "content": None}
                found.append(turn)
            if kind != "reasoning":
                name, is_text = given(item, "name", str, where), kind == "custom_tool_call"
                name = f"{namespace}.{name}" if (namespace := item.get("namespace")) else name
                written = given(item, "input" if is_text else "arguments", str, where)
                function = {"name": name, "arguments": json.dumps({"input": written}) if is_text else written}
                call = {"id": given(item, "call_id", str, where), "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            elif text := _reasoning(item, where):
                turn["reasoning_content"] = text
    if not found:
        raise no_message("input")
    return found


def hosted_items(items: str | Sequence[dict[str, Any]]) -> list[str]:
    """Return the types of the items that are left out because they belong to unsupported tools."""
    return [] if isinstance(items, str) else [str(kind) for item in items if (kind := item.get("type")) in ITEMS]


def _turn(found: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest message if it is the assistant's."""
    return found[-1] if found and found[-1].get("role") == "assistant" else None


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Return the text of a reasoning item."""
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ApiError(400, f"{where}.content: must be a list of text parts", param=f"{where}.content")
    return "\n".join(text for part in parts if isinstance(text := part.get("text"), str))
