"""The first texts of a run are printed as they come, one after the other."""

from __future__ import annotations

import io

from rich.console import Console

from gapless.conf.sampling import SamplingParams
from gapless.launch.prompts import Prompt
from gapless.launch.shown_texts import ShownTexts
from gapless.runtime.engine.outputs import CompletionOutput, RequestOutput

PROMPTS = [Prompt(text, None, SamplingParams()) for text in ("one", "two", "x" * 300, "four")]


def output(index: int, *texts: str, reason: str | None = None) -> RequestOutput:
    """Make a snapshot; all outputs but the last have ended."""
    ends: list[str | None] = [*["stop"] * (len(texts) - 1), reason]
    own = [
        CompletionOutput(n, text=text, finish_reason=end) for n, (text, end) in enumerate(zip(texts, ends, strict=True))
    ]
    return RequestOutput(index, index, PROMPTS[index].text, [1, 2], own)


class Paper:
    """A console, and what has been written on it since the last look."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        self.texts = ShownTexts(Console(file=self.file, width=30), PROMPTS)

    def after(self, *outputs: RequestOutput) -> str:
        begin = len(self.file.getvalue())
        for each in outputs:
            self.texts.update(each)
        return self.file.getvalue()[begin:]


def test_on_a_terminal_a_text_is_printed_as_it_comes() -> None:
    paper = Paper()
    paper.texts.stream = True
    assert paper.after(output(1, " and"), output(3, "never")) == ""
    assert paper.after(output(0, "")) == ""
    assert paper.after(output(0, " is a")) == "0 · 2 prompt tokens ──────────\none is "
    assert paper.after(output(0, " is a num")) == "a "
    assert paper.after(output(1, " and three")) == ""
    assert paper.after(output(0, " is a number", reason="stop")) == "number\n1 · 2 prompt tokens ──────────\ntwo and "
    assert not paper.texts.are_over
    last = paper.after(output(1, " and three", reason="length"), output(2, "a", "b\x1b[0m", reason="abort"))
    assert last.startswith("three [length]\n2.0 · 2 prompt tokens ")
    assert last.endswith("x" * 240 + "b\\x1b[0m [abort]\n")
    assert paper.texts.are_over


def test_elsewhere_a_text_is_printed_when_it_is_complete_and_its_turn_has_come() -> None:
    paper = Paper()
    assert paper.after(output(0, " is"), output(1, " and", reason="stop")) == ""
    text = paper.after(output(0, " is", reason="stop"))
    assert text == "0 · 2 prompt tokens ──────────\none is\n1 · 2 prompt tokens ──────────\ntwo and\n"


def test_a_text_that_is_cut_off_ends_its_line() -> None:
    paper = Paper()
    paper.texts.stream = True
    with paper.texts:
        paper.after(output(0, " is a"))
    assert paper.file.getvalue().endswith("one is a\n")
