"""`gapless bench url=URL`: benchmarks an OpenAI-compatible server, reported like runs of our own pipeline."""

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
    from ..runtime.analysis.run_folder.read import RunFolder
    from ..runtime.core.request_record import RequestRecord
    from ..runtime.core.work_item import WorkItem
    from ..runtime.simulation.workload import Workload

_KEY = "OPENAI_API_KEY"
_WARMUP_REQUESTS = 4
_NOTE = "The requests were sent to a server; its stage times and causes of idle time are unknown."


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """A reachable server, and the parameters of its requests of at most `context` tokens."""

    target: Target
    config: WorkloadConfig
    tokenizer: str | None
    vocab_size: int
    context: int

    def workload(self, run: int) -> Workload:
        """Make the requests of run number `run` (from 0), with fresh prompts, as the server may cache earlier ones.

        Raises:
            ConfigError: the workload is invalid or cannot be read.
        """
        config = replace(self.config, seed=(self.config.seed + run) % (1 << 32))
        return requests_of(config, self.tokenizer, self.vocab_size, self.context)


def prepare_load(config: BenchConfig) -> PreparedLoad:
    """Query the served model and validate the workload; `model` gives the vocabulary.

    Raises:
        ConfigError: the server cannot be reached, or the workload or the model's files are invalid.
    """
    from ..models.checkpoint import Checkpoint

    assert config.url is not None
    if config.policies:
        raise ConfigError(f"url={config.url}: the server has its own policy; remove scheduler")
    checkpoint = Checkpoint.open(config.model, tensors=False)
    arch = checkpoint.arch
    key = os.environ.get(_KEY, "")
    target, longest = asyncio.run(find_target(config.url, config.url_model, key, arch.vocab_size))
    context = longest or config.model.max_model_len or arch.max_position
    prepared = PreparedLoad(target, config.workload, checkpoint.tokenizer, arch.vocab_size, context)
    log_cut_requests(prepared.workload(0), context)
    return prepared


def run_load(config: BenchConfig, prepared: PreparedLoad, run_dir: Path, *, brief: bool) -> None:
    """Send the workload `repeats` times; write one run folder per run, and the comparison.

    Raises:
        PipelineError: all requests failed.
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
    from ..runtime.analysis.report.run_tables import latency_table

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
    """Write the run folder of one run."""
    from ..runtime.analysis.ledger.fleet import Fleet
    from ..runtime.core.run_record import RunRecord

    unknown = ["stages", "kv", "queue", "tokens", "context"]
    record = RunRecord(1, 0, requests=list(found), notes=[_NOTE], unknown=unknown)  # type: ignore[arg-type]
    folder = run_dir / turn.folder
    run = write_turn(folder, Fleet([record]), config, turn, title=turn.label)
    return folder_of(folder, run)
