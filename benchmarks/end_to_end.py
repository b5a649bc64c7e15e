"""Compares simulated steps with an engine's published ones: `python -m benchmarks.end_to_end FOLDER`.

FOLDER holds `end_to_end/llama2-70b.csv`: medians of the time of a batch of prompts and of a decode step of LLaMA 2 70B,
by the vLLM-based engine of Splitwise (ISCA 2024) on A100s and H100s. It launches kernels one by one, so that its steps
are those of `simulation.launch=eager`. Errors are |simulated / published - 1|, median and 90th percentile, by TP.

`--fit` searches the constants of `hardware.costs.eager_host` on TP 2 and 8 alone, and prints them; TP 4 is held out.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gapless.conf.build import load_group, load_hardware
from gapless.conf.costs import HostConfig
from gapless.conf.schema import Architecture
from gapless.runtime.cost.analytic import AnalyticOperators
from gapless.runtime.cost.stage_costs import MicroBatchShape, StageCosts

DEVICES = {"a100-80gb": "a100-80g", "h100-80gb": "h100"}
_BAD = (2, 64)  # TP and batch whose published times are wrong by their source
_FITTED = (2, 8)
_MANY_TOKENS = 4096  # of prompts in a batch; beyond, that engine's time grows faster than its work
_WORST = 0.5  # what a row may count for in the fit


@dataclass(frozen=True)
class Step:
    """A published step: of prompts or of decodes, `rows` of them; `device_s` is what its kernels take by the model."""

    device: str
    tp: int
    is_prompt: bool
    tokens: int
    rows: int
    device_s: float
    seconds: float


def read(folder: Path) -> Iterator[Step]:
    """Read the published steps, each with the model's time of its kernels."""
    arch = Architecture(**load_group("model", "llama2-70b")["architecture"])
    with (folder / "end_to_end" / "llama2-70b.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    costs: dict[tuple[str, int], StageCosts] = {}
    for line in lines:
        device, tp, batch = DEVICES[line["hardware"]], int(line["tp"]), int(line["batch_size"])
        if (tp, batch) == _BAD:
            continue
        if (device, tp) not in costs:
            constants = load_hardware(device).costs
            assert constants is not None
            source = AnalyticOperators(arch, tp, constants, 2)
            costs[device, tp] = StageCosts([arch.num_layers], [source], host=False, last_layer="all")
        prompt, output = int(line["prompt_tokens"]), int(line["output_tokens"])
        prompts = MicroBatchShape([(prompt, 0)] * batch, sampled=batch)
        decodes = MicroBatchShape(decodes=batch, context=batch * (prompt + output // 2), sampled=batch)
        for shape, name in ((prompts, "prompt_ms"), (decodes, "token_ms")):
            seconds = costs[device, tp].seconds(shape)[0]
            yield Step(device, tp, shape is prompts, shape.rows, batch, seconds, float(line[name]) / 1e3)


def simulated(step: Step, host: HostConfig) -> float:
    """The seconds of a step under a host."""
    launches = 80 * host.layer_us * 1e-6
    return max(host.stretch * step.device_s, launches) + (host.step_us + step.rows * host.row_us) * 1e-6


def errors(steps: list[Step], host: HostConfig) -> np.ndarray:
    return np.array([abs(simulated(step, host) / step.seconds - 1) for step in steps])


def fit(steps: list[Step]) -> HostConfig:
    """Search the constants with the least mean error, where no step counts for more than `_WORST`."""
    found, least = HostConfig(), float("inf")
    grid = itertools.product(
        np.arange(250, 660, 10), (0, 100, 200, 300, 400, 500), (0, 1000, 2000, 4000, 8000), (1.0, 1.1, 1.15, 1.2, 1.25)
    )
    for layer_us, row_us, step_us, stretch in grid:
        host = HostConfig(layer_us=float(layer_us), row_us=float(row_us), step_us=float(step_us), stretch=stretch)
        error = float(np.minimum(errors(steps, host), _WORST).mean())
        if error < least:
            found, least = host, error
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fit", action="store_true", help="search the constants on TP 2 and 8")
    arguments = parser.parse_args()
    if not (arguments.folder / "end_to_end").is_dir():
        print(f"{arguments.folder}: no published times there; nothing is compared")
        return
    steps = list(read(arguments.folder))
    kinds: dict[str, Callable[[Step], bool]] = {
        "decodes": lambda step: not step.is_prompt,
        f"prompts, below {_MANY_TOKENS:,} tokens": lambda step: step.is_prompt and step.tokens < _MANY_TOKENS,
        f"prompts, {_MANY_TOKENS:,} tokens and more": lambda step: step.is_prompt and step.tokens >= _MANY_TOKENS,
        "all": lambda step: True,
    }
    for device in DEVICES.values():
        own = [step for step in steps if step.device == device]
        costs = load_hardware(device).costs
        assert costs is not None
        assert costs.eager_host is not None
        host = costs.eager_host
        if arguments.fit:
            host = fit([step for step in own if step.tp in _FITTED])
            print(f"hardware={device}: {host}")
        print(f"\n{device:<34}{'rows':>5}{'eager':>14}{'90%':>8}{'device alone':>16}{'90%':>8}")
        for tp, (name, is_kind) in itertools.product((2, 4, 8), kinds.items()):
            rows = [step for step in own if step.tp == tp and is_kind(step)]
            eager, alone = errors(rows, host), errors(rows, HostConfig())
            print(f"tp {tp}, {name:<28}{len(rows):>5}{np.median(eager):>14.1%}{np.percentile(eager, 90):>8.1%}"
                  f"{np.median(alone):>16.1%}{np.percentile(alone, 90):>8.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
