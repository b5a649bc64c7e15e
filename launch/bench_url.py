"""`gapless bench url=URL`: a workload sent to a server of OpenAI's form, in the same tables as runs of one's own."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs
from rich.console import Console

from ..conf.errors import ConfigError
from ..conf.schema import BenchConfig
from ..conf.workloads import WorkloadConfig
from .load_client import Target, find_target, send_all
from .progress import Meter, print_files, print_throughput
from .results import compare, folder_of, log_cut_requests, write_turn
from .turns import Turn, expected, requests_of

if TYPE_CHECKING:
    from ..runtime.core.request_record import RequestRecord
    from ..runtime.run_folder.read import RunFolder
    from ..runtime.workload import WorkItem, Workload

_KEY = "OPENAI_API_KEY"
_WARMUP_REQUESTS = 4
_NOTE = "The requests were sent to a server; when its stages computed and why they were idle is not known."


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """A server that answers, and what requests for it are made of, of at most `context` tokens each."""

    target: Target
    config: WorkloadConfig
    tokenizer: str | None
    vocab_size: int
    context: int

    def workload(self, run: int) -> Workload:
        """Make the requests of a run, counted from 0: with prompts of its own, as the server may keep those before.

        Raises:
            ConfigError: the workload cannot be read or made.
        """
        config = replace(self.config, seed=(self.config.seed + run) % (1 << 32))
        return requests_of(config, self.tokenizer, self.vocab_size, self.context)


def prepare_load(config: BenchConfig) -> PreparedLoad:
    """Find out what the server serves, and check the requests: `model` says their vocabulary.

    Raises:
        ConfigError: the server cannot be reached, or the workload or the model's files are wrong.
    """
    from ..models.huggingface import resolve_architecture, resolve_weights

    assert config.url is not None
    if config.policies:
        raise ConfigError(f"url={config.url}: the server has its own policy; give no list of them as scheduler")
    path = resolve_weights(config.model, tensors=False)
    arch = resolve_architecture(config.model, tensors=False)
    key = os.environ.get(_KEY, "")
    target, longest = asyncio.run(find_target(config.url, config.url_model, key, arch.vocab_size))
    context = longest or config.model.max_model_len or arch.max_position
    tokenizer = config.model.tokenizer or (str(path) if path else None)
    prepared = PreparedLoad(target, config.workload, tokenizer, arch.vocab_size, context)
    log_cut_requests(prepared.workload(0), context)
    return prepared


def run_load(config: BenchConfig, prepared: PreparedLoad, run_dir: Path, *, brief: bool) -> None:
    """Send the workload `repeats` times; write a run folder of each, and what compares them.

    Raises:
        PipelineError: no request was answered.
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    target = prepared.target
    label = f"{target.model} at {target.name}"
    name = re.sub(r"[^a-z0-9_=.-]+", "_", label.lower())
    plan = [Turn(label, config.scheduler, n, f"{n:02}_{name}") for n in range(1, config.repeats + 1)]
    plan = plan if len(plan) > 1 else [Turn(label, config.scheduler, 1, "")]
    if config.warmup:
        first = [structs.replace(item, arrival=0.0) for item in prepared.workload(config.repeats)[:_WARMUP_REQUESTS]]
        _send(target, first, None)
    done: list[RunFolder] = []
    for turn in plan:
        workload = prepared.workload(turn.repeat - 1)
        if workload.warmup is not None:
            _send(target, workload.warmup, prepared.config)
        with Meter(errors, expected(config.workload, workload), label) as meter:
            found = _send(target, workload, prepared.config, lambda tokens, ended: meter.update(tokens, ended, None))
        done.append(_write(config, turn, run_dir, found, errors))
        print_throughput(console, label, done[-1].summary)
    if brief:
        return
    if len(plan) > 1:
        compare(console, run_dir, config, plan, done, workload.num_cut)
        return
    from ..runtime.report.terminal import latency_table

    console.print(latency_table(done[0].summary))
    print_files(console, ("report", run_dir / "report.html"))


def _send(
    target: Target,
    items: Sequence[WorkItem],
    workload: WorkloadConfig | None,
    on_tokens: Callable[[int, int], None] = lambda tokens, ended: None,
) -> list[RequestRecord]:
    return asyncio.run(send_all(target, items, workload, on_tokens))


def _write(
    config: BenchConfig, turn: Turn, run_dir: Path, found: Sequence[RequestRecord], errors: Console
) -> RunFolder:
    """Write the run folder of one turn."""
    from ..runtime.core.run_record import RunRecord
    from ..runtime.ledger.fleet import Fleet

    unknown = ["stages", "kv", "queue", "tokens", "context"]
    record = RunRecord(1, 0, requests=list(found), notes=[_NOTE], unknown=unknown)  # type: ignore[arg-type]
    folder = run_dir / turn.folder
    run = write_turn(folder, Fleet([record]), config, turn, title=turn.label)
    return folder_of(folder, run)
