"""Compares `gapless simulate` with Vidur, a peer simulator, on the same runs: `python -m benchmarks.vidur PYTHON DATA`.

PYTHON is an interpreter that has Vidur (microsoft/vidur, MIT; `pip install vidur==0.0.26`), DATA a folder of its
measurements of an A100 (`benchmarks/support/measurements.py` says which files). Vidur learns the times of operators
from them once (`--cache FOLDER` keeps what it learned), and the constants of `hardware=a100-80g` were fitted to them.
Both get the same model, ranks, arrivals, KV blocks and bounds on requests and tokens of a micro-batch, and neither adds
host overhead. Where a key of ours names what Vidur assumes, it is set to that: a stage cannot compute while it sends,
and it sends whole activations. Vidur's policies, and ours with the same rule:

    sarathi   decodes first, then chunks of prompts, up to `tokens`       token_budget, scheduler.budget=`tokens`
    vllm      prompts first, whole, up to `tokens`; else decodes          prefill_first, scheduler.max_batched_tokens
    orca      decodes and whole prompts                                   token_budget without a bound

Runs take turns, one at a time. The first table compares simulated times. The second compares speed, in medians of CPU
seconds over `--rounds`:

    simulation      Vidur without any metric, gapless with its record of every token and span
    with metrics    Vidur with request, batch and utilization metrics as CSV, gapless with ledger and summary
    whole command   a process from start to end, Vidur without plots, traces and learning, gapless with page and trace

The third compares predicted times of single micro-batches, by operator, with the measured times.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.cost.make import make_costs
from gapless.runtime.cost.stage_costs import MicroBatchShape
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.ledger.latencies import completed_requests
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.ledger.summary import summarize
from gapless.runtime.simulation.run import simulated
from gapless.runtime.simulation.setting import make_setting
from gapless.runtime.workload import Workload

from .support import measurements
from .support.results import add_json_option, write_json
from .support.vidur_process import CODELLAMA, LLAMA, TP, Model, Vidur

NO_BOUND = 1 << 20
HIDDEN = 8192  # of both models
ASSUMED = (
    "simulation.host=false", "simulation.scatter_gather=false", "simulation.overlap_sends=false",
    "simulation.last_layer=all", "hardware.attention=flash_attention",
)  # fmt: skip
OURS = {
    "sarathi": ("scheduler=token_budget", "scheduler.budget={tokens}"),
    "vllm": ("scheduler=prefill_first", "scheduler.max_batched_tokens={tokens}"),
    "orca": ("scheduler=token_budget", f"scheduler.budget={NO_BOUND}"),
}
ZIPF = ("workload=zipf", "workload.pd_ratio=10")  # 1,024 to 4,096 tokens
CHAT = ("workload=fixed", "workload.input_len=1024", "workload.output_len=256", "workload.range_ratio=0.8")
WRITING = ("workload=fixed", "workload.input_len=256", "workload.output_len=512", "workload.range_ratio=0.5")
RATE = "workload.request_rate=3"
COMMAND = "import benchmarks, sys; from gapless.launch.cli import main; sys.exit(main(sys.argv[1:]))"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Setting:
    """A run that both simulators make.

    `tokens` and `batch` bound the tokens and requests of a micro-batch. With `follow` the chunks of a prompt follow
    each other through the stages, as they always do in gapless. By Vidur's default each waits until the one before has
    left.
    """

    model: Model
    pp: int
    policy: str
    tokens: int
    batch: int
    workload: tuple[str, ...]
    follow: bool = True

    def __str__(self) -> str:
        words = {ZIPF: "zipf", CHAT: "chat", WRITING: "writing"}
        lengths = next(word for keys, word in words.items() if self.workload[: len(keys)] == keys)
        policy = self.policy + (f" {self.tokens}" if self.tokens else "") + ("" if self.follow else ", chunks wait")
        arrivals = "at 3/s" if RATE in self.workload else "at once"
        return f"{self.model.short} pp {self.pp}, {policy}, {lengths} {arrivals}"


SETTINGS = (
    Setting(CODELLAMA, 1, "sarathi", 512, 64, ZIPF),
    Setting(CODELLAMA, 2, "sarathi", 512, 64, ZIPF),
    Setting(CODELLAMA, 4, "sarathi", 512, 64, ZIPF),
    Setting(CODELLAMA, 4, "sarathi", 512, 64, ZIPF, follow=False),
    Setting(CODELLAMA, 4, "sarathi", 256, 32, ZIPF),
    Setting(CODELLAMA, 2, "sarathi", 512, 64, (*CHAT, RATE)),
    Setting(CODELLAMA, 2, "sarathi", 512, 64, (*CHAT, RATE), follow=False),
    Setting(CODELLAMA, 4, "sarathi", 512, 128, WRITING),
    Setting(CODELLAMA, 1, "vllm", 4096, 64, CHAT),
    Setting(CODELLAMA, 4, "vllm", 4096, 32, ZIPF),
    Setting(CODELLAMA, 2, "orca", 0, 64, (*CHAT, RATE)),
    Setting(LLAMA, 4, "sarathi", 512, 64, (*CHAT, RATE)),
    Setting(LLAMA, 4, "vllm", 4096, 64, ZIPF),
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

    def figures(self) -> list[float]:
        """Makespan, mean and p99 TTFT, mean and p99 end-to-end latency, in simulated seconds."""
        arrival, first, end = self.times.T
        return [
            float(value) for value in (
                end.max(), (first - arrival).mean(), np.percentile(first - arrival, 99), (end - arrival).mean(),
                np.percentile(end - arrival, 99),
            )
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--cache", type=Path, help="where Vidur keeps what it learned; default: a temporary folder")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of settings, from 1; default: all")
    add_json_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        vidur = Vidur(arguments.python, arguments.data, arguments.cache or Path(scratch), Path(scratch))
        print(f"Vidur {vidur.version()} / gapless; A100 80 GB, tp {TP}, {arguments.requests} requests each")
        start = time.perf_counter()
        for model in (CODELLAMA, LLAMA):
            vidur.operators(model, 2, [[(1, 1)]])
        print(f"Vidur has learned the times of operators, {time.perf_counter() - start:.0f} s")
        chosen = [SETTINGS[number - 1] for number in arguments.only] if arguments.only else SETTINGS
        tables = compare(vidur, chosen, arguments.requests, arguments.rounds)
        tables["operators"] = by_operator(vidur, arguments.data)
    write_json(arguments.json, "vidur", tables)


def compare(vidur: Vidur, settings: Sequence[Setting], num: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Simulate all settings; print and return the tables of simulated times and of speed."""
    tables: dict[str, list[dict[str, Any]]] = {"simulated": [], "speed": []}
    table(("", "makespan", "ours", "mean TTFT", "p99 TTFT", "mean e2e", "p99 e2e"))
    speeds = []
    for setting in settings:
        config = configure(setting, num)
        workload, _ = requests(config)
        turns = [turn(vidur, setting, config, workload) for _ in range(rounds)]
        a, b = (side.figures() for side in turns[0][0])
        pairs = [f"{x:.2f} / {y:.2f} s" for x, y in zip(a, b, strict=True)]
        table((str(setting), pairs[0], f"{b[0] / a[0] - 1:+.1%}", *pairs[1:]))
        names = ("makespan", "mean_ttft", "p99_ttft", "mean_e2e", "p99_e2e")
        tables["simulated"].append({
            "setting": str(setting), "makespan_difference_share": b[0] / a[0] - 1,
            **{f"vidur_{name}_s": value for name, value in zip(names, a, strict=True)},
            **{f"gapless_{name}_s": value for name, value in zip(names, b, strict=True)},
        })  # fmt: skip
        speeds.append([
            [statistics.median(each[level][side].seconds for each in turns) for side in range(2)] for level in range(3)
        ])  # fmt: skip
    table(("", "requests/s", "times", "with metrics", "times", "whole command", "times"))
    for setting, levels in zip(settings, speeds, strict=True):
        texts = [f"{num / a:.0f} / {num / b:.0f}" for a, b in levels[:2]]
        texts.append("{:.1f} / {:.1f} s".format(*levels[2]))
        times = [f"{a / b:.1f}" for a, b in levels]
        table((str(setting), *(cell for pair in zip(texts, times, strict=True) for cell in pair)))
        (bare, metrics, command) = levels
        tables["speed"].append({
            "setting": str(setting),
            "vidur_requests_per_s": num / bare[0], "gapless_requests_per_s": num / bare[1],
            "speed_ratio": bare[0] / bare[1],
            "vidur_with_metrics_requests_per_s": num / metrics[0],
            "gapless_with_metrics_requests_per_s": num / metrics[1],
            "with_metrics_speed_ratio": metrics[0] / metrics[1],
            "vidur_command_s": command[0], "gapless_command_s": command[1],
            "command_speed_ratio": command[0] / command[1],
        })  # fmt: skip
    return tables


def turn(vidur: Vidur, setting: Setting, config: SimulateConfig, workload: Workload) -> list[list[Simulated]]:
    """Run both simulators once; (Vidur's, ours) of the simulation alone, with metrics, and of a whole command."""

    def theirs(metrics: bool) -> tuple[Simulated, Simulated]:
        """Run Vidur; its simulation, and the same with the CPU time of its whole process."""
        plan = make_plan(config)
        before = _seconds_of_children()
        times, seconds = vidur.simulate(
            setting.model, setting.pp, workload, policy=setting.policy, tokens=setting.tokens, metrics=metrics,
            follow=setting.follow and setting.policy == "sarathi" and setting.pp > 1, num_blocks=plan.num_blocks,
            most_requests=setting.batch * (1 if setting.policy == "orca" else setting.pp),
        )  # fmt: skip
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
    (replica,) = simulated(make_setting(config), workload)
    if metrics:
        summarize(replica.record, Ledger(replica.record))
    seconds = time.process_time() - start
    done = completed_requests(replica.record)
    assert len(done) == len(workload)
    return Simulated(np.array([(r.arrival, r.token_times[0], r.token_times[-1]) for r in done]), seconds)


def whole_command(setting: Setting, num: int) -> float:
    """CPU seconds of `gapless simulate`, run folder and page included."""
    with tempfile.TemporaryDirectory() as folder:
        before = _seconds_of_children()
        subprocess.run(
            [sys.executable, "-c", COMMAND, "simulate", *overrides(setting, num), f"hydra.run.dir={folder}/run"],
            check=True, capture_output=True,
        )  # fmt: skip
        return _seconds_of_children() - before


def overrides(setting: Setting, num: int) -> list[str]:
    return [
        *setting.model.overrides, "hardware=a100-80g", f"parallel.tp={TP}", f"parallel.pp={setting.pp}",
        *(word.format(tokens=setting.tokens) for word in OURS[setting.policy]), f"scheduler.batch={setting.batch}",
        *setting.workload, f"workload.num_prompts={num}", *ASSUMED,
    ]  # fmt: skip


def configure(setting: Setting, num: int) -> SimulateConfig:
    return compose_one(overrides(setting, num), SimulateConfig, "simulate")


def by_operator(vidur: Vidur, data: Path) -> list[dict[str, Any]]:
    """Print and return microseconds of each operator of one layer: Vidur's, ours, measured."""
    found = []
    setting = Setting(CODELLAMA, 2, "sarathi", 512, 64, ZIPF)
    config = configure(setting, 1)
    plan = make_plan(config)
    costs, layers = make_costs(config, plan), len(plan.layers[0])
    theirs = vidur.operators(CODELLAMA, setting.pp, list(MICRO_BATCHES.values()))
    print("\none layer of CodeLlama 34B at tp 2, microseconds: theirs / ours / measured")
    for (name, micro_batch), a in zip(MICRO_BATCHES.items(), theirs, strict=True):
        chunks = tuple((tokens, context - tokens) for tokens, context in micro_batch if tokens > 1)
        contexts = [context for tokens, context in micro_batch if tokens == 1]
        shape = MicroBatchShape(chunks, len(contexts), sum(contexts))
        b = {part: seconds * 1e3 / layers for part, seconds in costs.breakdown(shape, 0).items()}
        c = measured(data, shape)
        rows = [(part, a[part], b[part], c[part]) for part in a]
        rows.append(("sum", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
        print(f"  {name}")
        for part, *times in rows:
            x, y, z = (1e3 * time for time in times)
            print(f"    {part:12}{x:8.0f} /{y:6.0f} /{z:6.0f}   {x / z - 1:+7.1%} {y / z - 1:+7.1%}")
            found.append({
                "micro_batch": name, "operator": part, "vidur_us": x, "gapless_us": y, "measured_us": z,
                "vidur_error_share": x / z - 1, "gapless_error_share": y / z - 1,
            })  # fmt: skip
    return found


def measured(data: Path, shape: MicroBatchShape) -> dict[str, float]:
    """Measured milliseconds of each operator of a CodeLlama layer; of messages, those of the nearest size."""
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


def table(cells: Sequence[str]) -> None:
    """Print a row of a table, or its headings if the first cell is empty."""
    first, *others = cells
    print(("" if first else "\n") + f"{first:48}" + "".join(f"{cell:>19}" for cell in others), flush=True)


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
