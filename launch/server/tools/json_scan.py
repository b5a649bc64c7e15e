"""Incremental parser of a tool call as a JSON object, character by character."""

from __future__ import annotations

import json

_KEYS = frozenset(("name", "arguments", "parameters", "id", "type", "function"))  # keys of calls across models
_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class ValueScan:
    """Finds the end of a JSON object, array or string."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_escaped = False
        self.in_text = False

    def push(self, char: str) -> bool:
        """Take the next character; return whether the value is complete with it."""
        if self.in_text:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self.in_text = False
            return not self.in_text and self._depth == 0
        if char == '"':
            self.in_text = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class CallScan:
    """Parses `{"name": NAME, "arguments": {...}}`. The keys may be in any order, along with others.

    Attributes:
        name: name of the call, once it is known.
        is_done: whether the object is complete.
        has_failed: whether this is not a call: not an object, or an unknown key before the name.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = self.has_failed = False
        self._step = self._open
        self._key = self._value = ""
        self._scan = ValueScan()
        self._arguments: list[str] = []
        self._has_arguments = False

    @property
    def in_text(self) -> bool:
        """Whether the next character is within a JSON string."""
        return self._step in (self._in_key, self._in_value) and self._scan.in_text

    def push(self, char: str) -> None:
        """Take the next character."""
        self._step(char)

    def take(self) -> str:
        """Return the arguments' text since the last call of this method; `{}` for a call without arguments."""
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        text, self._arguments = "".join(self._arguments), []
        return text

    def _open(self, char: str) -> None:
        if char == "{":
            self._step = self._before_key
        elif char not in _SPACE:
            self.has_failed = True

    def _before_key(self, char: str) -> None:
        if char == "}":
            self.is_done, self.has_failed = True, self.name is None
        elif char == '"':
            self._value, self._scan, self._step = char, ValueScan(), self._in_key
            self._scan.push(char)
        elif char not in _SPACE + ",":
            self.has_failed = True

    def _in_key(self, char: str) -> None:
        self._value += char
        if self._scan.push(char):
            key = self._decoded()
            self._key = key if isinstance(key, str) else ""
            self.has_failed = self.has_failed or (self.name is None and self._key not in _KEYS)
            self._step = self._after_key

    def _after_key(self, char: str) -> None:
        if char == ":":
            self._step = self._before_value
        elif char not in _SPACE:
            self.has_failed = True

    def _before_value(self, char: str) -> None:
        if char not in _SPACE:
            self._value, self._scan, self._step = "", ValueScan(), self._in_value
            self._in_value(char)

    def _in_value(self, char: str) -> None:
        is_plain = bool(self._value) and self._value[0] not in '{["'  # a number or a literal, which ends before `char`
        if is_plain and char in _SPACE + ",}":
            self._end_value()
            self._before_key(char)
            return
        self._value += char
        is_complete = self._scan.push(char)
        if self._key in _ARGUMENTS and self._value[0] == "{":
            self._has_arguments = True
            self._arguments.append(char)
        if is_complete:
            self._end_value()

    def _end_value(self) -> None:
        self._step = self._before_key
        if self._key == "name":
            name = self._decoded()
            self.name, self.has_failed = (name, False) if isinstance(name, str) else (None, True)
        elif self._key in _ARGUMENTS and self._value[0] != "{":
            value = self._decoded()
            self._has_arguments = True
            self._arguments.append(value if isinstance(value, str) else "{}" if value is None else self._value)

    def _decoded(self) -> object:
        try:
            return json.loads(self._value, strict=False)
        except (ValueError, RecursionError):
            self.has_failed = True
            return None
