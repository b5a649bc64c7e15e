"""The commands with their names, summaries, configs and examples."""

from __future__ import annotations

from dataclasses import dataclass

from ..conf.difference import DiffConfig
from ..conf.explaining import ExplainConfig
from ..conf.profiling import ProfileConfig
from ..conf.schema import (
    BenchConfig,
    ChatConfig,
    EngineConfig,
    GenerateConfig,
    ReportConfig,
    ServeConfig,
    SimulateConfig,
)
from ..conf.tuning import CapacityConfig, TuneConfig


@dataclass(frozen=True, slots=True)
class Command:
    """A command of `gapless`.

    Its module, `launch/<name>.py`, has two functions. `prepare(config, stdin)` validates a run and returns its plans,
    workload or prompts. `run(config, prepared, run_dir)` takes these and does the work.

    A command with a `positional` key runs no requests and is not composed by hydra: it has no groups and no sweeps, and
    writes to the given folder. The other commands have a hydra config `conf/<name>.yaml` with their groups and their
    changes of the schema's defaults. Their `run` also takes a `launcher`.

    Attributes:
        config: the schema of its config.
        positional: the key that takes the positional arguments.
        others: the key that takes overrides of keys that `config` lacks.
        has_ranks: whether a launcher starts ranks for it.
        folder: the default of `hydra.run.dir`, for help.
        compares: whether a sweep ends with a comparison of its runs.
        takes_vllm_options: whether it takes a positional MODEL, vLLM's options and `serve.config`.
    """

    name: str
    summary: str
    config: type[EngineConfig] | type[ReportConfig] | type[DiffConfig] | type[ExplainConfig]
    examples: tuple[str, ...]
    positional: str | None = None
    others: str | None = None
    has_ranks: bool = True
    folder: str = "runs/DATE_TIME"
    compares: bool = False
    takes_vllm_options: bool = False


COMMANDS = {
    command.name: command
    for command in (
        Command(
            "generate",
            "generates texts from prompts; prints texts, writes JSONL and a report to the run folder",
            GenerateConfig,
            (
                'gapless generate prompt="import os"',
                "gapless generate parallel=pp2 prompts=shipped scheduler.chunk=128",
                "gapless generate model=./my-llama parallel=pp2 prompts=prompts.jsonl sampling.max_tokens=64",
                "gapless generate -m scheduler=sarathi,orca_best parallel=pp2 prompts=shipped",
            ),
        ),
        Command(
            "chat",
            "chats with a model in the terminal, with the speed and idle time of each response",
            ChatConfig,
            ("gapless chat", "gapless chat model=./my-llama.gguf parallel=pp2 'system=Answer in one sentence.'"),
        ),
        Command(
            "serve",
            "serves an OpenAI-compatible HTTP API, with metrics, health checks and a live page",
            ServeConfig,
            (
                "gapless serve ./my-llama parallel=pp2",
                "gapless serve parallel=pp2 scheduler=equal_time serve.port=9000 'serve.api_keys=[@keys]'",
                "gapless serve ./my-llama --tensor-parallel-size 2 --max-model-len 4096",
            ),
            takes_vllm_options=True,
        ),
        Command(
            "bench",
            "benchmarks one or several policies with one workload; prints a table and writes a report",
            BenchConfig,
            (
                "gapless bench parallel=pp2 workload.input_len=512 workload.output_len=64 workload.num_prompts=32",
                "gapless bench scheduler=orca_best,sarathi parallel=pp2 workload=zipf workload.max_len=2048 repeats=5",
                "gapless bench scheduler=sarathi workload=trace workload.path=trace.csv.gz workload.time_scale=0.1",
                "gapless bench -m scheduler=sarathi scheduler.chunk=128,256,auto parallel=pp2",
                "gapless bench url=http://127.0.0.1:8000 workload.request_rate=4 workload.input_len=512",
            ),
            compares=True,
        ),
        Command(
            "simulate",
            "simulates one or several policies with one workload on a cluster, from measured or fitted operator times",
            SimulateConfig,
            (
                "gapless simulate model=gpt3-175b scheduler=orca_best,sarathi,equal_time workload.num_prompts=1000",
                "gapless simulate model=llama2-70b parallel=tp8 simulation.replicas=8 workload.request_rate=20",
                "gapless simulate -m scheduler=sarathi,equal_time scheduler.chunk=128,256,512 parallel=tp8_pp8",
            ),
            has_ranks=False,
            compares=True,
        ),
        Command(
            "profile",
            "measures a model's operators on this machine for gapless simulate, and validates the predictions",
            ProfileConfig,
            (
                "gapless profile model=llama-160m parallel=pp2 parallel.threads=1",
                "gapless profile check=profiles/llama-160m_cpu_pp2",
            ),
            folder="profiles/MODEL_HARDWARE_PP",
        ),
        Command(
            "capacity",
            "finds the maximum request rate within an SLO on a simulated cluster, with confidence intervals",
            CapacityConfig,
            (
                "gapless capacity model=llama2-70b parallel=tp8 slo.ttft_p99_ms=2000 slo.tbt_p99_ms=100",
                "gapless capacity scheduler=sarathi,equal_time parallel=tp4_pp2 workload.num_prompts=1000 seeds=5",
            ),
            has_ranks=False,
        ),
        Command(
            "tune",
            "searches tp x pp x replicas, split, chunk, depth and policy for the highest request rate within an SLO",
            TuneConfig,
            (
                "gapless tune model=llama2-70b hardware=a100-80g nodes=1 slo.ttft_p99_ms=2000 slo.tbt_p99_ms=100",
                "gapless tune nodes=2 workload=trace workload.path=trace.csv.gz workload.num_prompts=1000",
                "gapless tune scheduler=sarathi search.tp=[8] search.pp=[1] search.chunk=[128,256,512,1024]",
            ),
            has_ranks=False,
        ),
        Command(
            "report",
            "writes the report of a run or the comparison of several, from run folders or traces of other engines",
            ReportConfig,
            (
                "gapless report runs/DATE_TIME",
                "gapless report multirun/DATE_TIME sort=p99_itl_ms out=comparison",
                "gapless report import=kineto TRACES",
            ),
            positional="runs",
        ),
        Command(
            "diff",
            "explains the difference of two runs by settings, causes of idle time, stages and requests",
            DiffConfig,
            (
                "gapless diff runs/first runs/second",
                "gapless diff multirun/DATE_TIME/0 multirun/DATE_TIME/1 out=difference",
            ),
            positional="runs",
        ),
        Command(
            "explain",
            "suggests improvements of a run by replaying it with other policies, chunks, depths and layer splits",
            ExplainConfig,
            (
                "gapless explain runs/DATE_TIME",
                "gapless explain runs/DATE_TIME scheduler.chunk=256,512 parallel.depth=3 objective=p99_itl_ms",
            ),
            positional="run",
            others="changes",
        ),
    )
}
