"""Compares `gapless simulate` with Vidur, a peer simulator, on the same runs: `python -m benchmarks.vidur PYTHON DATA`.

PYTHON is an interpreter with Vidur (microsoft/vidur, MIT; `pip install vidur==0.0.26`), DATA a folder of its
measurements of an A100 (see `benchmarks/support/measurements.py`). Vidur trains its predictors on them once (`--cache
FOLDER` keeps the result), and the constants of `hardware=a100-80g` were fitted to them. Both get the same model, ranks,
arrivals, KV blocks and limits on requests and tokens per micro-batch, and neither adds host overhead. gapless runs with
Vidur's assumptions: a stage cannot compute while it sends, and it sends whole activations. Vidur's policies, and ours
with the same rule:

    sarathi   decodes first, then chunks of prompts, up to `tokens`       token_budget, its max_batched_tokens
    vllm      whole prompts first, up to `tokens`; else decodes           prefill_first, its max_prefill_tokens
    orca      decodes and whole prompts                                   token_budget without a bound

Runs are interleaved, one at a time. The first table compares simulated times. The second compares speed, in medians of
CPU seconds over `--rounds`:

    simulation      Vidur without metrics, gapless with its record of every token and span
    with metrics    Vidur with request, batch and utilization metrics as CSV, gapless with ledger and summary
    whole command   a process from start to end, Vidur without plots, traces and training, gapless with report and trace

The third compares predicted times of single micro-batches with measured times, by operator.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gapless.conf.schema import SimulateConfig
from gapless.launch.turns import requests
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.core.latencies import completed_requests
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.pipeline.make_costs import make_costs
from gapless.runtime.simulation.workload import Workload

from .support import measurements
from .support.harness import Benchmark, say, scratch, words
from .support.simulated import configure, replicas_of
from .support.vidur_process import CODELLAMA, LLAMA, TP, Model, Vidur

NO_BOUND = 1 << 20
HIDDEN = 8192  # of both models
ASSUMED = (
    "simulation.host=false simulation.scatter_gather=false simulation.overlap_sends=false simulation.last_layer=all "
    "hardware.attention=flash_attention"
)
OURS = {
    "sarathi": "scheduler=token_budget scheduler.max_batched_tokens={tokens}",
    "vllm": "scheduler=prefill_first scheduler.max_prefill_tokens={tokens}",
    "orca": f"scheduler=token_budget scheduler.max_batched_tokens={NO_BOUND}",
}
WORKLOADS = {
    "zipf": "workload=zipf workload.pd_ratio=10",  # 1,024 to 4,096 tokens
    "chat": "workload=fixed workload.input_len=1024 workload.output_len=256 workload.range_ratio=0.8",
    "writing": "workload=fixed workload.input_len=256 workload.output_len=512 workload.range_ratio=0.5",
}
COMMAND = "import benchmarks, sys; from gapless.launch.cli import main; sys.exit(main(sys.argv[1:]))"
FIGURES = ("makespan", "mean_ttft", "p99_ttft", "mean_e2e", "p99_e2e")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Setting:
    """A run for both simulators.

    `tokens` and `batch` limit the tokens and requests per micro-batch. With `follow` the chunks of a prompt are
    pipelined through the stages, as always in gapless. By Vidur's default each chunk waits until the previous one has
    left.
    """

    model: Model
    pp: int
    policy: str
    tokens: int
    batch: int
    lengths: str
    rate: int | None = None
    follow: bool = True

    def __str__(self) -> str:
        policy = self.policy + (f" {self.tokens}" if self.tokens else "") + ("" if self.follow else ", chunks wait")
        arrivals = f"at {self.rate}/s" if self.rate else "at once"
        return f"{self.model.short} pp {self.pp}, {policy}, {self.lengths} {arrivals}"

    def overrides(self, num: int) -> list[str]:
        return words(
            self.model.overrides,
            f"hardware=a100-80g parallel.tp={TP} parallel.pp={self.pp} {OURS[self.policy].format(tokens=self.tokens)}",
            f"scheduler.batch={self.batch} {WORKLOADS[self.lengths]} workload.num_prompts={num} {ASSUMED}",
            *([f"workload.request_rate={self.rate}"] if self.rate else []),
        )


SETTINGS = (
    Setting(CODELLAMA, 1, "sarathi", 512, 64, "zipf"),
    Setting(CODELLAMA, 2, "sarathi", 512, 64, "zipf"),
    Setting(CODELLAMA, 4, "sarathi", 512, 64, "zipf"),
    Setting(CODELLAMA, 4, "sarathi", 512, 64, "zipf", follow=False),
    Setting(CODELLAMA, 4, "sarathi", 256, 32, "zipf"),
    Setting(CODELLAMA, 2, "sarathi", 512, 64, "chat", 3),
    Setting(CODELLAMA, 2, "sarathi", 512, 64, "chat", 3, follow=False),
    Setting(CODELLAMA, 4, "sarathi", 512, 128, "writing"),
    Setting(CODELLAMA, 1, "vllm", 4096, 64, "chat"),
    Setting(CODELLAMA, 4, "vllm", 4096, 32, "zipf"),
    Setting(CODELLAMA, 2, "orca", 0, 64, "chat", 3),
    Setting(LLAMA, 4, "sarathi", 512, 64, "chat", 3),
    Setting(LLAMA, 4, "vllm", 4096, 64, "zipf"),
)
# Micro-batches whose sizes were measured: (new tokens, context with them) of each request.
MICRO_BATCHES = {
    "a chunk of 512": [(512, 512)],
    "a chunk of 512 after 1,024": [(512, 1536)],
    "64 decodes over 1,024": [(1, 1024)] * 64,
    "a chunk of 480 after 512, 32 decodes over 1,024": [(480, 992), *[(1, 1024)] * 32],
    "a prompt of 2,048": [(2048, 2048)],
}


@dataclass(frozen=True, slots=True)
class Simulated:
    """`times` [requests, 3]: arrival, first token and end in simulated seconds; `seconds`: CPU time to simulate."""

    times: Floats
    seconds: float

    def figures(self) -> dict[str, float]:
        """Return makespan, mean and p99 TTFT, mean and p99 end-to-end latency, in simulated seconds."""
        arrival, first, end = self.times.T
        latencies = [f(each) for each in (first - arrival, end - arrival) for f in (np.mean, _p99)]
        return dict(zip(FIGURES, map(float, (end.max(), *latencies)), strict=True))


def _p99(values: Floats) -> float:
    return float(np.percentile(values, 99))


def main() -> int:
    bench = Benchmark(
        __doc__,
        {"python": Path, "data": Path},
        cache={"type": Path, "help": "Vidur's trained predictors; default: a temporary folder"},
        requests=500,
        rounds=3,
        only={"type": int, "nargs": "*", "help": "numbers of settings, starting at 1; default: all"},
    )
    given = bench.given
    with scratch() as folder:
        vidur = Vidur(given.python, given.data, given.cache or folder, folder)
        say(f"Vidur {vidur.version()}")
        start = time.perf_counter()
        for model in (CODELLAMA, LLAMA):
            vidur.operators(model, 2, [[(1, 1)]])
        say(f"trained Vidur's predictors, {time.perf_counter() - start:.0f} s")
        for setting in [SETTINGS[number - 1] for number in given.only] if given.only else SETTINGS:
            compare(bench, vidur, setting)
        by_operator(bench, vidur, given.data)
    return bench.end()


def compare(bench: Benchmark, vidur: Vidur, setting: Setting) -> None:
    """Simulate a setting in interleaved runs; report simulated times and speed."""
    num, config = bench.given.requests, configure(*setting.overrides(bench.given.requests))
    workload, _ = requests(config)
    turns = [turn(vidur, setting, config, workload) for _ in range(bench.given.rounds)]
    theirs, ours = (side.figures() for side in turns[0][0])
    times = {f"vidur_{name}_s": value for name, value in theirs.items()}
    times |= {f"gapless_{name}_s": value for name, value in ours.items()}
    off = ours["makespan"] / theirs["makespan"] - 1
    bench.row("simulated", setting=str(setting), makespan_difference_share=off, **times)
    speeds: dict[str, float] = {}
    for level, name in enumerate(("", "with_metrics_", "command_")):
        seconds = [statistics.median(each[level][side].seconds for each in turns) for side in range(2)]
        for who, taken in zip(("vidur", "gapless"), seconds, strict=True):
            if name == "command_":
                speeds[f"{who}_command_s"] = taken
            else:
                speeds[f"{who}_{name}requests_per_s"] = num / taken
        speeds[f"{name}speed_ratio"] = seconds[0] / seconds[1]
    bench.row("speed", setting=str(setting), **speeds)


def turn(vidur: Vidur, setting: Setting, config: SimulateConfig, workload: Workload) -> list[list[Simulated]]:
    """Run both simulators once; return (Vidur's, ours) for the simulation alone, with metrics, and a whole command."""
    num_blocks = make_plan(config).num_blocks

    def theirs(metrics: bool) -> tuple[Simulated, Simulated]:
        """Run Vidur; return its simulation, and the same with the CPU time of the whole process."""
        before = _seconds_of_children()
        times, seconds = vidur.simulate(
            setting.model,
            setting.pp,
            workload,
            policy=setting.policy,
            tokens=setting.tokens,
            metrics=metrics,
            follow=setting.follow and setting.policy == "sarathi" and setting.pp > 1,
            num_blocks=num_blocks,
            batch_size_cap=setting.batch * (1 if setting.policy == "orca" else setting.pp),
        )
        return Simulated(times, seconds), Simulated(times, _seconds_of_children() - before)

    bare, _ = theirs(metrics=False)
    ours = simulate(config, workload, metrics=False)
    with_metrics, command = theirs(metrics=True)
    return [
        [bare, ours],
        [with_metrics, simulate(config, workload, metrics=True)],
        [command, Simulated(ours.times, whole_command(setting, len(workload)))],
    ]


def simulate(config: SimulateConfig, workload: Workload, *, metrics: bool) -> Simulated:
    start = time.process_time()
    (replica,) = replicas_of(config, workload)
    if metrics:
        summarize(Fleet([replica.record]))
    seconds = time.process_time() - start
    done = completed_requests(replica.record)
    assert len(done) == len(workload)
    return Simulated(np.array([(r.arrival, r.token_times[0], r.token_times[-1]) for r in done]), seconds)


def whole_command(setting: Setting, num: int) -> float:
    """Return the CPU seconds of `gapless simulate`, including run folder and report."""
    with scratch() as folder:
        before = _seconds_of_children()
        keys = [*setting.overrides(num), f"hydra.run.dir={folder / 'run'}"]
        subprocess.run([sys.executable, "-c", COMMAND, "simulate", *keys], check=True, capture_output=True)
        return _seconds_of_children() - before


def by_operator(bench: Benchmark, vidur: Vidur, data: Path) -> None:
    """Report Vidur's, our and measured microseconds of each operator of a CodeLlama 34B layer at tp 2."""
    setting = SETTINGS[1]
    config = configure(*setting.overrides(1))
    plan = make_plan(config)
    costs, layers = make_costs(config, plan), len(plan.layers[0])
    theirs = vidur.operators(CODELLAMA, setting.pp, list(MICRO_BATCHES.values()))
    for (name, micro_batch), a in zip(MICRO_BATCHES.items(), theirs, strict=True):
        chunks = tuple((tokens, context - tokens) for tokens, context in micro_batch if tokens > 1)
        contexts = [context for tokens, context in micro_batch if tokens == 1]
        shape = MicroBatchShape(chunks, len(contexts), sum(contexts))
        b = {part: seconds * 1e3 / layers for part, seconds in costs.breakdown(shape, 0).items()}
        c = measured(data, shape)
        rows = [(part, a[part], b[part], c[part]) for part in a]
        rows.append(("sum", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
        for part, *times in rows:
            x, y, z = (1e3 * time for time in times)
            errors = {"vidur_error_share": x / z - 1, "gapless_error_share": y / z - 1}
            us = {"vidur_us": x, "gapless_us": y, "measured_us": z}
            bench.row("operators", micro_batch=name, operator=part, **us, **errors)


def measured(data: Path, shape: MicroBatchShape) -> dict[str, float]:
    """Return the measured milliseconds of each operator of a CodeLlama layer; all-reduces are of the nearest size."""
    products, rows = measurements.read_linear(data, CODELLAMA.measured.removeprefix("mlp_"))
    chunks, decodes, _ = measurements.read_attention(data)
    reduced = [each for each in measurements.read_all_reduce(data)["dgx_all_reduce"] if each.ranks == TP]
    linear = {p.operator: p.seconds for p in products if (p.tp, p.rows) == (TP, shape.rows)}
    kernels = {r.operator: r.seconds for r in rows if (r.tp, r.rows) == (TP, shape.rows)}
    attention = [each.seconds for each in chunks if (each.length, each.prefix) in shape.chunks]
    if shape.decodes:
        mean = shape.context // shape.decodes
        attention += [each.seconds for each in decodes if (each.requests, each.context) == (shape.decodes, mean)]
    assert len(attention) == len(shape.chunks) + bool(shape.decodes), "attention of these sizes was not measured"
    size = shape.rows * HIDDEN * measurements.ELEMENT
    message = min(reduced, key=lambda each: abs(each.size - size))
    seconds = {
        **linear,
        "attn": sum(attention),
        "others": 2 * kernels["norm"] + 2 * kernels["add"] + kernels["rope"] + kernels["activation"],
        "all_reduce": 2 * message.seconds,
    }
    return {name: value * 1e3 for name, value in seconds.items()}


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
