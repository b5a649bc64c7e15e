"""Streams the first texts of a run to the terminal, word-wrapped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from .progress import can_redraw, printable
from .prompts import Prompt

if TYPE_CHECKING:
    from ..runtime.engine.outputs import RequestOutput

_PROMPT_TAIL = 240  # characters of a prompt that are shown
SHOWN_TEXTS = 3  # number of prompts whose outputs are shown


class ShownTexts:
    """Prints the outputs of the first prompts, one after the other.

    On a terminal the current output is streamed; elsewhere outputs are printed when complete.

    Args:
        console: standard output.
        prompts: all prompts of the run.
    """

    def __init__(self, console: Console, prompts: Sequence[Prompt]) -> None:
        self._console = console
        self._prompts = prompts[:SHOWN_TEXTS]
        self.stream = bool(prompts) and can_redraw(console)
        self._paper = Wrapped(console, console.width if console.is_terminal else None)
        self._newest: dict[int, RequestOutput] = {}  # latest output by prompt
        self._at = 0, 0  # prompt and output that are being printed
        self._length = -1  # characters of its text that are printed; -1: not even its title

    def __enter__(self) -> ShownTexts:
        return self

    def __exit__(self, *error: object) -> None:
        if self._length >= 0:  # an incomplete text
            self._paper.end()

    @property
    def are_over(self) -> bool:
        """Whether all outputs have been printed."""
        return self._at[0] == len(self._prompts)

    def update(self, output: RequestOutput) -> None:
        """Print new text of the current output, and following outputs that are complete."""
        if output.index >= len(self._prompts):
            return
        self._newest[output.index] = output
        while self._at[0] in self._newest and self._print(self._newest[self._at[0]], self._at[1]):
            index, number = self._at
            is_last = number + 1 == len(self._newest[index].outputs)
            self._at, self._length = (index + 1, 0) if is_last else (index, number + 1), -1

    def _print(self, output: RequestOutput, number: int) -> bool:
        """Print new text of an output. Return whether the output is complete."""
        own = output.outputs[number]
        if not own.finished and not (self.stream and own.text):
            return False
        if self._length < 0:
            self._length = 0
            label = f"{output.index}" if len(output.outputs) == 1 else f"{output.index}.{number}"
            title = f"{label} · {len(output.prompt_token_ids)} prompt tokens"
            self._console.rule(Text(title, "dim"), align="left", style="dim")
            prompt = self._prompts[output.index]
            tail = prompt.shown if len(prompt.shown) <= _PROMPT_TAIL else f"… {prompt.shown[-_PROMPT_TAIL:]}"
            self._paper.write(printable(tail) + "\n" * (prompt.messages is not None), "dim")
        self._paper.write(printable(own.text[self._length :]), "bold green")
        self._length = len(own.text)
        if own.finished:
            if own.finish_reason != "stop":
                self._paper.write(f" [{own.finish_reason}]", "dim")
            self._paper.end()
        return own.finished


class Wrapped:
    """Writes streamed text to a console, word-wrapped.

    Args:
        console: the output.
        width: terminal columns; None: no wrapping.
    """

    def __init__(self, console: Console, width: int | None) -> None:
        self._console, self._width = console, width
        self._column = 0
        self._word = ""  # the last word, which may continue
        self._style = ""

    def write(self, text: str, style: str = "") -> None:
        """Write all complete words, and buffered text of another style."""
        if style != self._style:
            self._put([self._word])
            self._word, self._style = "", style
        *words, self._word = re.split(r"(?<=\s)", self._word + text)
        self._put(words)

    def end(self) -> None:
        """Write the rest and end the line."""
        self._put([self._word, "\n"])
        self._word = ""

    def _put(self, words: Sequence[str]) -> None:
        out = ""
        for word in words:
            width = cell_len(word.rstrip())
            if self._width is not None and self._column and self._column + width > self._width:
                out += "\n"
                self._column = 0
            out += word
            self._column = 0 if word.endswith("\n") else self._column + width + len(word) - len(word.rstrip())
        self._console.print(Text(out, self._style), end="", soft_wrap=True)
        self._console.file.flush()
