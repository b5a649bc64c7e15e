"""Streaming parser of model output: reasoning, text and tool calls. One state machine for all formats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .call_grammar import BARE_CALL
from .formats import NAME, Channels, ReasoningFormat, ToolFormat
from .json_scan import CallScan, ValueScan

_LONGEST_NAME = 256  # characters, including the format's markers


@dataclass(frozen=True, slots=True)
class Said:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoned:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """The start of a call. `index` counts calls from 0; `id` is the model's own id, "" if it wrote none."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Part = Said | Reasoned | Called | Arguments


class Reader:
    """Takes pieces of an output; returns the parts that are final after each.

    The parts do not depend on how the output is split into pieces, once neighbours of a type are joined. Text that only
    looked like a call is returned as text. Whitespace around reasoning and calls is dropped.

    Args:
        format: format of calls; None: no tools were offered, and apparent calls are text.
        reasoning: format of reasoning; None: there is none.
        in_reasoning: whether the prompt has begun the reasoning.
        tools: the schema of each tool's parameters, by name.
        most_calls: maximum number of calls, later ones are dropped; None: no limit.
        is_either: whether the output is either calls or an answer, decided by its first words; an answer is all text.
    """

    def __init__(
        self,
        format: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        *,
        in_reasoning: bool = False,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        most_calls: int | None = None,
        is_either: bool = False,
    ) -> None:
        self._format = format
        self._is_either = is_either
        self._reasoning = reasoning
        self._tools = tools or {}
        self._most_calls = most_calls
        self.num_calls = 0
        self._pending = ""  # not consumed by a state yet
        self._raw = ""  # consumed, but may turn out not to be a call
        self._spaces = ""  # trailing whitespace so far
        self._is_last = False
        self._parts: list[Part] = []
        self._is_open = False  # whether the client got the start of a call, but not its end
        self._name = ""  # of that call
        self._object = CallScan()
        self._value = ValueScan()
        self._num_pairs = 0
        self._has_reasoned = False
        self._has_text = not in_reasoning  # else leading whitespace of the text is dropped
        self._step: Callable[[], bool] = self._in_reasoning if in_reasoning and reasoning else self._start

    @property
    def is_reasoning(self) -> bool:
        """Whether the parser is within reasoning."""
        return self._step == self._in_reasoning

    def push(self, text: str) -> list[Part]:
        """Take the next piece."""
        self._pending += text
        self._parts = []
        while self._step():
            pass
        return self._parts

    def finish(self) -> list[Part]:
        """Return the parts that were held back, at the end of the output."""
        self._is_last = True
        parts = self.push("")
        if self._raw:
            self._give_text(self._raw)
        if self._spaces and not self.num_calls and self._has_text:
            self._add(Said(self._spaces))
        self._raw = self._spaces = ""
        return parts

    def _add(self, part: Part) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(part, Called) or type(last) is not type(part) or not part.text:
            if isinstance(part, Called) or part.text:
                self._parts.append(part)
        elif isinstance(part, Arguments):
            self._parts[-1] = Arguments(part.index, getattr(last, "text", "") + part.text)
        else:
            self._parts[-1] = type(part)(getattr(last, "text", "") + part.text)

    def _give_text(self, text: str) -> None:
        text = self._spaces + text if self._has_text else (self._spaces + text).lstrip()
        shown = text.rstrip()
        self._spaces = text[len(shown) :]
        if shown:
            self._has_text = True
            self._add(Said(shown))

    def _give_arguments(self, text: str) -> None:
        if self._most_calls is None or self.num_calls <= self._most_calls:
            self._add(Arguments(self.num_calls - 1, text))

    def _begin_call(self, name: str, id: str = "") -> None:
        self._raw = self._spaces = ""
        self._has_text = False  # text after calls has no leading whitespace
        self._is_open, self._name = True, name
        self.num_calls += 1
        if self._most_calls is None or self.num_calls <= self._most_calls:
            self._add(Called(self.num_calls - 1, name, id))

    def _fail(self) -> bool:
        """Return what looked like a call as text."""
        raw, self._raw = self._raw, ""
        self._give_text(raw)
        self._step = self._text
        return True

    def _until(self, *marks: str) -> tuple[str, str]:
        """Consume the text up to the first of `marks`, and the mark, which is "" if there is none yet.

        A possible prefix of a mark is held back, except at the end of the output.
        """
        text = self._pending
        places = [(place, -len(mark), mark) for mark in marks if mark and (place := text.find(mark)) >= 0]
        if places:
            place, _, mark = min(places)
            self._pending = text[place + len(mark) :]
            return text[:place], mark
        held = 0 if self._is_last else max((_overlap(text, mark) for mark in marks), default=0)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held], ""

    def _skip(self, length: int, is_call: bool = True) -> None:
        """Consume text that belongs to a possible call, or is dropped."""
        if is_call and not self._is_open:
            self._raw += self._pending[:length]
        self._pending = self._pending[length:]

    def _may_become(self, text: str, *marks: str) -> bool:
        return not self._is_last and any(mark.startswith(text) for mark in marks)

    # States: each consumes what it can, and returns whether the next state should run.

    def _start(self) -> bool:
        text, begin = self._pending.lstrip(), self._reasoning.begin if self._reasoning else ""
        if begin and text.startswith(begin):
            self._pending, self._has_text = text[len(begin) :], False
            self._step = self._in_reasoning
            return True
        if (begin and self._may_become(text, begin)) or (not text and not self._is_last):
            return False
        return self._begin_answer(text)

    def _begin_answer(self, text: str) -> bool:
        """Begin the output after any reasoning; `text` is its start so far."""
        format = self._format
        is_call = format is not None and format.is_bare and text.startswith("{")
        if format is not None and self._is_either:
            words = (*format.opens, *((BARE_CALL,) if format.is_bare else ()))
            if not text.startswith(words):
                if self._may_become(text, *words):
                    return False
                self._format, is_call = None, False
        self._object, self._step = CallScan(), self._in_object if is_call else self._text
        return True

    def _in_reasoning(self) -> bool:
        channels = self._format.channels if self._format is not None else None
        end = channels.ends[0] if channels is not None else self._reasoning.end if self._reasoning is not None else ""
        text, mark = self._until(end)
        text = self._spaces + text if self._has_reasoned else text.lstrip()
        shown = text.rstrip()
        self._has_reasoned = self._has_reasoned or bool(shown)
        self._spaces = "" if mark or self._is_last else text[len(shown) :]
        self._add(Reasoned(shown))
        if mark:
            self._has_reasoned, self._has_text = False, False
            self._step = self._after_reasoning
        return bool(mark)

    def _after_reasoning(self) -> bool:
        self._pending = self._pending.lstrip()
        return bool(self._pending) and self._begin_answer(self._pending)

    def _text(self) -> bool:
        format = self._format
        if format is None:
            self._give_text(self._until()[0])
            return False
        text, mark = self._until(*format.opens, *(format.channels.ends if format.channels else ()))
        self._give_text(text)
        if mark in format.opens:
            self._raw, self._spaces = self._spaces, ""
            self._pending = mark + self._pending
            self._step = self._before_call
            if format.channels:
                self._skip(len(mark))
                self._step = self._in_name
        return bool(mark)

    def _before_call(self) -> bool:
        """Skip markers before a call or after the last."""
        format = self._format
        assert format is not None
        text = self._pending.lstrip()
        *before, begin = format.call.split() or ("{",)
        others = [*before, *format.opens, *format.section_end.split(), *format.call_end.split()]
        words = [word for word in others if word != begin or not format.call]
        if text.startswith(begin):
            self._skip(len(self._pending) - len(text) + (len(begin) if format.call else 0))
            self._object = CallScan()
            self._step = self._in_object if format.payload == "object" else self._in_name
            return True
        if word := next((word for word in words if text.startswith(word)), ""):
            self._skip(len(self._pending) - len(text) + len(word), is_call=bool(self._raw))
            return True
        if self._may_become(text, begin, *words):
            return False
        if format.payload == "object" and text[:1] in tuple(",;["):
            self._skip(len(self._pending) - len(text) + 1, is_call=bool(self._raw))
            return True
        if not self._raw or not text:
            self._raw, self._pending = "", text
            self._step = self._text
            return bool(text)
        return self._fail()

    def _in_object(self) -> bool:
        format, scan = self._format, self._object
        assert format is not None
        for place, char in enumerate(self._pending):
            if not scan.in_text and (is_end := self._is_end(place)) is not False:
                self._skip(place)
                return bool(is_end) and self._end_object()
            scan.push(char)
            if scan.name is not None and not self._is_open and not scan.has_failed:
                if format.is_bare and scan.name not in self._tools:
                    scan.has_failed = True
                else:
                    self._begin_call(scan.name)
            if self._is_open and (text := scan.take()):
                self._give_arguments(text)
            if scan.is_done or (scan.has_failed and not self._is_open):
                self._skip(place + 1)
                return self._end_object()
        self._skip(len(self._pending))
        return False

    def _is_end(self, place: int) -> bool | None:
        """Return whether an incomplete call ends at this place of the pending text; None: undecided."""
        assert self._format is not None
        end = next(iter(self._format.call_end.split()), "")
        if not end or self._pending[place] != end[0]:
            return False
        if self._pending.startswith(end, place):
            return True
        return None if self._may_become(self._pending[place : place + len(end)], end) else False

    def _end_object(self) -> bool:
        return self._end_call() if self._is_open else self._fail()

    def _in_name(self) -> bool:
        format = self._format
        assert format is not None
        kept = [mark.strip() for mark in (format.pairs[0], *format.call_end.split()[:1])] if not format.channels else []
        before = self._pending
        name_end = format.name_end.strip() or "\n"
        text, mark = self._until(name_end, *kept)
        if not mark:
            self._pending = before
            if len(before) <= _LONGEST_NAME and not self._is_last:
                return False
            self._skip(len(before))
            return self._fail()
        self._raw += before[: len(before) - len(self._pending)]
        if mark in kept and mark != name_end:
            self._pending = mark + self._pending
        if format.channels:
            return self._begin_channel(format, format.channels, text)
        id = text.strip()
        name = id.removeprefix(format.name_begin)
        name = name.partition(format.id_begin)[0] if format.id_begin else name
        if not NAME.fullmatch(name):
            return self._fail()
        self._begin_call(name, id if format.name_begin else "")
        self._begin_arguments(format)
        return True

    def _begin_channel(self, format: ToolFormat, channels: Channels, header: str) -> bool:
        if found := re.search(channels.name, header):
            self._begin_call(found[1])
            self._begin_arguments(format)
        elif channels.reasoning in header:
            self._raw = ""
            self._step = self._in_reasoning
        else:
            self._raw = ""
            self._format = None if self._is_either else format
            self._step = self._text
        return True

    def _begin_arguments(self, format: ToolFormat) -> None:
        self._value, self._num_pairs = ValueScan(), 0
        self._step = self._in_pairs if format.payload == "pairs" else self._before_arguments

    def _before_arguments(self) -> bool:
        text = self._pending = self._pending.lstrip()
        if not text:
            return False
        self._step = self._in_arguments if text.startswith("{") else self._in_broken
        return True

    def _in_arguments(self) -> bool:
        for place, char in enumerate(self._pending):
            if not self._value.in_text and (is_end := self._is_end(place)) is not False:
                self._give_arguments(self._pending[:place].rstrip())
                self._pending = self._pending[place:]
                return bool(is_end) and self._end_call()
            if self._value.push(char):
                self._give_arguments(self._pending[: place + 1])
                self._pending = self._pending[place + 1 :]
                return self._end_call()
        self._give_arguments(self._pending)
        self._pending = ""
        return False

    def _in_broken(self) -> bool:
        """Pass on arguments that are not a JSON object, up to the call's end."""
        format = self._format
        assert format is not None
        text, mark = self._until(*format.call_end.split()[:1])
        self._give_arguments(text)
        self._pending = mark + self._pending
        return bool(mark) and self._end_call()

    def _end_call(self) -> bool:
        assert self._format is not None
        self._raw, self._is_open = "", False
        self._step = self._text if self._format.channels else self._before_call
        return True

    def _in_pairs(self) -> bool:
        format = self._format
        assert format is not None
        begin, key_end, value, value_end = (mark.strip() for mark in format.pairs)
        end = format.call_end.split()[0]
        text = self._pending = self._pending.lstrip()
        if text.startswith(end):
            self._give_arguments("}" if self._num_pairs else "{}")
            return self._end_call()
        if not text.startswith(begin):
            if not text or self._may_become(text, begin, end):
                return False
            _, mark = self._until(begin, end)  # text between pairs is dropped
            self._pending = mark + self._pending
            return bool(mark)
        key, found, rest = text[len(begin) :].partition(key_end)
        _, opened, rest = rest.partition(value) if value else ("", "-", rest)
        content, closed, rest = rest.partition(value_end)
        if not (found and opened and closed):
            return False
        if not value:  # the value is on separate lines
            content = content.removeprefix("\n").removesuffix("\n")
        pair = f"{json.dumps(key.strip(), ensure_ascii=False)}: {_as_json(content, self._tools.get(self._name), key)}"
        self._give_arguments((", " if self._num_pairs else "{") + pair)
        self._num_pairs += 1
        self._pending = rest
        return True


def _as_json(text: str, schema: Mapping[str, Any] | None, key: str) -> str:
    """Convert a value without JSON quotes to JSON, according to its key's schema."""
    properties = (schema or {}).get("properties")
    known = properties.get(key.strip()) if isinstance(properties, dict) else None
    kinds = known.get("type") if isinstance(known, dict) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if "string" not in kinds or (text == "null" and "null" in kinds):
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of `mark`."""
    most = min(len(text), len(mark) - 1)
    return next((length for length in range(most, 0, -1) if mark.startswith(text[-length:])), 0)
