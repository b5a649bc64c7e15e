"""`gapless chat`: a conversation in the terminal. Responses stream, each followed by a line with its speed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ..conf.errors import ConfigError
from ..conf.schema import ChatConfig
from ..models.chat_template import Conversation
from .progress import printable, shown, starting
from .prompts import StandardInput
from .run_report import make_report
from .shown_texts import Wrapped

if TYPE_CHECKING:
    from ..runtime.core.messages import Span
    from ..runtime.engine.llm import LLM
    from ..runtime.engine.plan import Plan
    from ..runtime.pipeline.launcher import Launcher

_log = logging.getLogger(__name__)
_HELP = "/reset starts a new conversation, /quit or Ctrl-D quits, Ctrl-C stops a response"


def prepare(config: ChatConfig, stdin: StandardInput) -> Plan:
    """Validate the model before anything starts.

    Raises:
        ConfigError: the checkpoint is invalid, the model does not fit, or it has no chat template.
    """
    from ..runtime.engine.intake import Intake
    from ..runtime.engine.plan import make_plan
    from ..runtime.pipeline.launcher import check_launcher

    check_launcher(config.parallel, config.hardware)
    plan = make_plan(config)
    if Intake(plan).chat_template is None:
        raise ConfigError(f"model={config.model.name}: no chat template; use gapless generate, or model=smollm2")
    return plan


def run(config: ChatConfig, prepared: Plan, run_dir: Path, launcher: Launcher | None = None) -> None:
    """Chat until the input ends, then write the run folder. `launcher` overrides the one in `config`.

    Raises:
        PipelineError: the ranks failed.
    """
    console = Console(highlight=False)
    with starting(Console(stderr=True, highlight=False), config) as on_progress:
        from ..runtime.engine.llm import LLM

        llm = LLM.from_config(config, launcher=launcher, on_progress=on_progress, plans={config.scheduler: prepared})
    with llm:
        console.print(Text(f"{config.model.name}: {_HELP}", "dim"))
        _converse(llm, config, console)
    if llm.record.requests and (report := make_report(llm.record, config)) is not None:
        report.write(run_dir)
        _log.info("report: %s", shown(run_dir / "report.html"))


def _converse(llm: LLM, config: ChatConfig, console: Console) -> None:
    first = [{"role": "system", "content": config.system}] if config.system else []
    messages = list(first)
    while (line := _read_line(console)) is not None:
        if line == "/quit":
            return
        if line == "/reset":
            messages = list(first)
            console.print(Text("new conversation", "dim"))
        elif line.startswith("/"):
            console.print(Text(f"{line}: unknown command; {_HELP}", "dim"))
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                answer = _answer(llm, asked, config, console)
            except ValueError as error:  # such as a prompt longer than the context
                console.print(Text(f"{error}; /reset starts a new conversation", "dim"))
            else:
                messages = [*asked, {"role": "assistant", "content": answer}]


def _read_line(console: Console) -> str | None:
    """Return the next line of standard input, stripped; None at its end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    import readline  # noqa: F401  (gives input() line editing and history)

    from .signals import plain_interrupts

    while True:
        try:
            with plain_interrupts():
                return input("> ").strip()
        except EOFError:
            console.print()
            return None
        except KeyboardInterrupt:  # discard the line
            console.print()


def _answer(llm: LLM, messages: Sequence[dict[str, Any]], config: ChatConfig, console: Console) -> str:
    """Stream a response to the terminal, then print its speed; return its text. Ctrl-C stops it.

    Raises:
        ValueError: the messages do not fit into the context.
    """
    from .signals import counted_interrupts

    num_spans, shown_text = len(llm.record.spans), ""
    reason, paper = "", Wrapped(console, console.width if sys.stdout.isatty() else None)
    with closing(llm.stream(Conversation(messages), config.sampling)) as outputs, counted_interrupts() as interrupts:
        for output in outputs:
            text = output.outputs[0].text
            paper.write(printable(text[len(shown_text) :]))
            shown_text = text
            if output.outputs[0].finish_reason == "length":
                reason = "; truncated by sampling.max_tokens or the context length"
            if interrupts():
                reason = "; stopped"
                break
    paper.end()
    console.print(Text(_speed(llm, llm.record.spans[num_spans:]) + reason, "dim"))
    return shown_text


def _speed(llm: LLM, spans: Sequence[Span]) -> str:
    """Return the speed of the last response: tokens per second, TTFT, and the share of idle stage time."""
    record = llm.record.requests[-1]
    times = record.token_times
    if not times or not spans:
        return "no tokens"
    rate = f", {(len(times) - 1) / (times[-1] - times[0]):.1f} tok/s" if len(times) > 1 else ""
    busy = sum(span.end - span.begin for span in spans)
    window = max(span.end for span in spans) - min(span.begin for span in spans)
    idle = 1 - busy / (window * llm.config.parallel.pp) if window else 0.0
    return f"{len(times)} tokens{rate}, TTFT {times[0] - record.arrival:.2f} s, {idle:.0%} idle"
