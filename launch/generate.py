"""`gapless generate`: generates texts from prompts, and writes JSONL and a run folder with a report."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ..conf.errors import ConfigError, reason
from ..conf.schema import GenerateConfig
from ..conf.user_path import user_path
from ..runtime.core.whole_file import whole_file
from .output_path import check_writable, is_open, open_output
from .progress import Meter, print_files, shown, starting
from .prompts import Prompt, StandardInput, read_prompts
from .run_report import make_report
from .shown_texts import SHOWN_TEXTS, ShownTexts

if TYPE_CHECKING:
    from ..runtime.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from ..runtime.engine.plan import Plan
    from ..runtime.pipeline.launcher import Launcher

_log = logging.getLogger(__name__)
_HEAD = b'{"index": '  # of each line of outputs


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated run: its plan and its prompts."""

    plan: Plan
    prompts: list[Prompt]


def prepare(config: GenerateConfig, stdin: StandardInput) -> Prepared:
    """Validate a run before anything starts.

    Raises:
        ConfigError: a prompt or the checkpoint is invalid, the model does not fit, or `outputs` cannot be written.
    """
    from ..runtime.engine.intake import Intake
    from ..runtime.engine.plan import make_plan
    from ..runtime.pipeline.launcher import check_launcher

    prompts = read_prompts(config, stdin)
    check_launcher(config.parallel, config.hardware)
    plan = make_plan(config)
    intake = Intake(plan)
    if config.chat and intake.chat_template is None:
        raise ConfigError(f"chat=true: model={config.model.name} has no chat template; remove chat")
    if config.chat is not False and intake.chat_template is not None:
        prompts = [prompt.as_chat() for prompt in prompts]
    intake.read([prompt.content for prompt in prompts], [prompt.params for prompt in prompts])
    if config.outputs is not None:
        outputs = user_path(config.outputs, "outputs")
        if not config.outputs or outputs.is_dir():
            raise ConfigError(f"outputs={config.outputs}: must be a file")
        if not outputs.parent.is_dir():
            raise ConfigError(f"outputs={config.outputs}: no such folder: {outputs.parent}")
        check_writable(outputs, "outputs")
        if config.prompts and outputs.exists() and user_path(config.prompts, "prompts").resolve() == outputs.resolve():
            raise ConfigError(f"outputs={config.outputs}: is the file of prompts; choose another path")
        if outputs.is_file() and not _may_write(outputs):
            raise ConfigError(f"outputs={config.outputs}: not a gapless outputs file; choose another path")
    return Prepared(plan, prompts)


def run(config: GenerateConfig, prepared: Prepared, run_dir: Path, launcher: Launcher | None = None) -> None:
    """Run the prompts and write the run folder. `launcher` overrides the one in `config`.

    Raises:
        ValueError: an error that the user can correct, such as a bad checkpoint.
        PipelineError: the ranks failed.
    """
    prompts = prepared.prompts
    path = user_path(config.outputs, "outputs") if config.outputs is not None else run_dir / "outputs.jsonl"
    console = Console(file=sys.stdout, highlight=False)  # sys.stdout now, before a progress bar replaces it
    errors = Console(stderr=True, highlight=False)
    with starting(errors, config) as on_progress:
        from ..runtime.engine.llm import LLM
        from ..runtime.pipeline.protocol import PipelineError

        plans = {config.scheduler: prepared.plan}
        llm = LLM.from_config(config, launcher=launcher, on_progress=on_progress, plans=plans)
        report = make_report(llm.record, config)
    try:
        with (
            llm,
            OutputsFile(path, run_dir / "outputs.jsonl", prompts) as outputs,
            ShownTexts(console, prompts if config.print_texts else ()) as texts,
            Meter(errors, len(prompts), waits=texts.stream) as meter,
        ):
            tokens: dict[int, int] = {}  # output tokens so far, by request
            for output in llm.stream([p.content for p in prompts], [p.params for p in prompts]):
                before = tokens.get(output.request_id, 0)
                tokens[output.request_id] = sum(len(completion.token_ids) for completion in output.outputs)
                texts.update(output)
                if texts.are_over:
                    meter.show()
                idle = None if report is None else report.bubbles.fraction()
                meter.update(tokens[output.request_id] - before, output.finished, idle)
                if output.finished:
                    outputs.append(output)
    except BaseException:
        # Finished outputs have been written. The report covers the run up to the failure.
        if report is not None:
            with suppress(Exception):
                report.write(run_dir)
                _log.info("report up to the failure: %s", shown(run_dir / "report.html"))
        raise
    if config.print_texts and (rest := len(prompts) - SHOWN_TEXTS) > 0:
        of = "prompt" if rest == 1 else "prompts"
        console.print(Text(f"… {rest} more {of} in {shown(path)}", "dim"), soft_wrap=True)
    if report is None:
        print_files(console, ("outputs", path))
    else:
        report.show(console, run_dir, ("outputs", path))
    failed = [output.index for output in outputs.in_order if any(o.finish_reason == "error" for o in output.outputs)]
    if failed:
        raise PipelineError(
            f"model={config.model.name}: non-finite logits for {len(failed)} of {len(prompts)} prompts (first: prompt "
            f"{failed[0]}); check the weights, or try model.dtype=float32"
        )


def _may_write(path: Path) -> bool:
    """Return whether writing loses nothing: the file is empty, has earlier outputs, or is already open."""
    with path.open("rb") as file:
        head = file.read(len(_HEAD))
    return head in (b"", _HEAD) or is_open(path)


class OutputsFile:
    """Writes `outputs.jsonl`: one line per prompt when it finishes; at the end the lines are sorted by prompt.

    A line has `index` (of the prompt), `prompt`, `messages` if any, `num_prompt_tokens` and `outputs`,
    each with `index`, `text`, `token_ids`, `finish_reason` and, if requested, `logprobs`. It also has
    `prompt_logprobs`, if requested.

    Standard output and error, under any name, are appended to and not sorted. If the file becomes unwritable, finished
    outputs are saved to `spare`, a file in the run folder.

    Raises:
        OSError: the file cannot be written. The message names the key and the file, and what was saved.
    """

    def __init__(self, path: Path, spare: Path, prompts: Sequence[Prompt]) -> None:
        self._path = path
        self._spare = spare
        self._prompts = prompts
        self._done: list[RequestOutput] = []

    def __enter__(self) -> OutputsFile:
        self._file, self._is_shared = open_output(self._path)
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        if error[0] is None and not self._is_shared and self._path.is_file() and self._done != self.in_order:
            path = self._path.resolve()  # keep a symbolic link
            # Without disk space for a second file, lines stay in order of completion.
            with suppress(OSError), whole_file(path) as part:
                part.write_text("".join(map(self._line, self.in_order)), encoding="utf-8")
                shutil.copymode(path, part)

    @property
    def in_order(self) -> list[RequestOutput]:
        """The finished outputs, in the order of the prompts."""
        return sorted(self._done, key=attrgetter("index"))

    def _line(self, output: RequestOutput) -> str:
        return _json_line(output, self._prompts[output.index])

    def append(self, output: RequestOutput) -> None:
        """Write a finished output immediately."""
        line = memoryview(self._line(output).encode())
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:]) or 0
        except OSError as error:
            with suppress(OSError):  # a device file cannot be truncated
                if not self._is_shared:
                    self._file.truncate(self._file.tell() - written)
            raise OSError(f"outputs={self._path}: {reason(error)}; {self._keep(output)}") from None
        self._done.append(output)

    def _keep(self, last: RequestOutput) -> str:
        """Write the outputs and `last` to the spare file if possible. Return a message about what was saved."""
        if self._spare.resolve() != self._path.resolve():
            with suppress(OSError):
                self._spare.write_text("".join(map(self._line, [*self._done, last])), encoding="utf-8")
                return f"{len(self._done) + 1} finished outputs are saved in {shown(self._spare)}"
        return f"the file has the first {len(self._done)} finished outputs"


def _json_line(output: RequestOutput, prompt: Prompt) -> str:
    row: dict[str, Any] = {"index": output.index, "prompt": output.prompt}
    row |= {} if prompt.messages is None else {"messages": prompt.messages}
    row |= {
        "num_prompt_tokens": len(output.prompt_token_ids),
        "outputs": [_json_completion(completion) for completion in output.outputs],
    }
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [None if each is None else _json_logprobs(each) for each in output.prompt_logprobs]
    return json.dumps(row, ensure_ascii=False) + "\n"


def _json_completion(completion: CompletionOutput) -> dict[str, Any]:
    row: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        row["logprobs"] = [_json_logprobs(position) for position in completion.logprobs]
    return row


def _json_logprobs(position: dict[int, Logprob]) -> dict[str, Any]:
    return {str(token): asdict(logprob) for token, logprob in position.items()}
