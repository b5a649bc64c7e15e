"""Compares simulated steps with an engine's published steps: `python -m benchmarks.end_to_end FOLDER`.

FOLDER contains `end_to_end/MODEL.csv`: median times of prefill batches and of decode steps of Splitwise's vLLM-based
engine (ISCA 2024) on A100s and H100s. It launches kernels individually, so its steps correspond to
`simulation.launch=eager`. Errors are simulated / published - 1: median and 90th percentile of the absolute error, and
the 10th and 90th percentile of published / simulated - 1, the correction of a prediction (`hardware.costs.error`).

`--model bloom-176b` compares a held-out model. `--fit` searches the constants of `hardware.costs.eager_host` on LLaMA 2
70B at TP 2 and 8, and prints them; TP 4 is held out.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gapless.conf.architecture import Architecture
from gapless.conf.build import load_group, load_hardware
from gapless.conf.costs import AttentionKernels, CostsConfig, HostConfig
from gapless.runtime.simulation.cost.analytic import AnalyticOperators
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape, StageCosts

from .support.harness import Benchmark, say

DEVICES = {"a100-80gb": "a100-80g", "h100-80gb": "h100"}
BLOOM = Architecture(  # bigscience/bloom; its positions are ALiBi, which no kernel of ours adds
    vocab_size=250880,
    hidden_size=14336,
    num_layers=70,
    num_heads=112,
    num_kv_heads=112,
    head_dim=128,
    ffn_size=57344,
    max_position=2048,
    norm="layer",
    activation="gelu",
    gated_ffn=False,
    position="learned",
)
MODELS = {"llama2-70b": Architecture(**load_group("model", "llama2-70b")["architecture"]), "bloom-176b": BLOOM}
_BAD = (2, 64)  # TP and batch whose requests do not fit into memory together
_FITTED = (2, 8)
_MANY_TOKENS = 4096  # prompt tokens from which that engine's time grows faster than its work
_FREE = ("layer_us", "row_us", "step_us", "prompt_us", "stretch", "bulk_gigabytes_per_s")
_WORST = 0.5  # cap of a row's error in the fit


@dataclass(frozen=True)
class Step:
    """A published prefill or decode step of `shape`."""

    arch: Architecture
    device: str
    tp: int
    is_prompt: bool
    shape: MicroBatchShape
    seconds: float


def read(folder: Path, model: str = "llama2-70b") -> Iterator[Step]:
    """Read the published steps of a model."""
    with (folder / "end_to_end" / f"{model}.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        device, tp, batch = DEVICES[line["hardware"]], int(line["tp"]), int(line["batch_size"])
        if (tp, batch) == _BAD:
            continue
        prompt, output = int(line["prompt_tokens"]), int(line["output_tokens"])
        prompts = MicroBatchShape([(prompt, 0)] * batch, sampled=batch)
        decodes = MicroBatchShape(decodes=batch, context=batch * (prompt + output // 2), sampled=batch)
        for shape, name in ((prompts, "prompt_ms"), (decodes, "token_ms")):
            yield Step(MODELS[model], device, tp, shape is prompts, shape, float(line[name]) / 1e3)


def predicted(steps: list[Step], host: HostConfig) -> np.ndarray:
    """Predict the seconds of one device's steps in an engine with the host constants `host`."""
    hardware = load_hardware(steps[0].device)
    assert hardware.costs is not None
    costs = replace(hardware.costs, eager_host=host)
    by_tp = {tp: _stage(steps[0].arch, costs, tp, hardware.attention) for tp in {step.tp for step in steps}}
    return np.array([by_tp[step.tp].seconds(step.shape)[0] for step in steps])


def _stage(arch: Architecture, costs: CostsConfig, tp: int, attention: AttentionKernels) -> StageCosts:
    source = AnalyticOperators(arch, tp, costs, 2, launch="eager", attention=attention)
    return StageCosts([arch.num_layers], [source], last_layer="all")


def errors(steps: list[Step], host: HostConfig) -> np.ndarray:
    """Return the signed relative error of each predicted step."""
    return predicted(steps, host) / np.array([step.seconds for step in steps]) - 1


def fit(steps: list[Step]) -> HostConfig:
    """Search the constants with the lowest mean error, each step's error capped at `_WORST`."""
    seconds = np.array([step.seconds for step in steps])
    shapes = [step.shape for step in steps]
    sampled = np.array([shape.sampled for shape in shapes])
    ranks = np.array([step.tp * step.is_prompt for step in steps])
    layers = steps[0].arch.num_layers
    found, least = HostConfig(), float("inf")
    for bulk_gigabytes_per_s in (0.0, *np.arange(20.0, 160.0, 10)):
        device = predicted(steps, HostConfig(bulk_gigabytes_per_s=bulk_gigabytes_per_s))
        grid = itertools.product(
            np.arange(300, 640, 20), range(0, 500, 100), range(0, 4000, 1000), range(0, 3500, 500),
            (1.0, 1.05, 1.1, 1.15, 1.2, 1.25),
        )  # fmt: skip
        for layer_us, row_us, step_us, prompt_us, stretch in grid:
            times = np.maximum(stretch * device, layers * layer_us * 1e-6)
            times = times + (step_us + sampled * row_us + ranks * prompt_us) * 1e-6
            error = float(np.minimum(np.abs(times / seconds - 1), _WORST).mean())
            if error < least:
                constants = map(float, (layer_us, row_us, step_us, prompt_us, stretch, bulk_gigabytes_per_s))
                found, least = HostConfig(**dict(zip(_FREE, constants, strict=True))), error
    return found


KINDS: dict[str, Callable[[Step], bool]] = {
    "decodes": lambda step: not step.is_prompt,
    f"prompts, below {_MANY_TOKENS:,} tokens": lambda step: step.is_prompt and step.shape.rows < _MANY_TOKENS,
    f"prompts, {_MANY_TOKENS:,} tokens and more": lambda step: step.is_prompt and step.shape.rows >= _MANY_TOKENS,
    "all prompts": lambda step: step.is_prompt,
    "all": lambda step: True,
}


def main() -> int:
    bench = Benchmark(
        __doc__,
        {"folder": Path},
        model={"choices": MODELS, "default": "llama2-70b"},
        fit={"action": "store_true", "help": "search the constants on LLaMA 2 70B at TP 2 and 8"},
    )
    folder, model = bench.given.folder, bench.given.model
    if not (file := folder / "end_to_end" / f"{model}.csv").is_file():
        print(f"{file}: no published times there; nothing is compared")
        return 0
    steps = list(read(folder, model))
    for device in DEVICES.values():
        costs = load_hardware(device).costs
        assert costs is not None
        assert costs.eager_host is not None
        host = costs.eager_host
        if bench.given.fit:
            host = fit([s for s in read(folder) if s.device == device and s.tp in _FITTED])
            say(f"hardware={device}: {host}")
        for tp, (name, is_kind) in itertools.product((2, 4, 8), KINDS.items()):
            rows = [step for step in steps if step.device == device and step.tp == tp and is_kind(step)]
            if not rows:
                continue
            signed, alone = errors(rows, host), np.abs(errors(rows, HostConfig()))
            found = {"eager": np.percentile(np.abs(signed), (50, 90)), "device_alone": np.percentile(alone, (50, 90))}
            found["correct_by"] = np.percentile(1 / (1 + signed) - 1, (10, 90))
            ends = {"correct_by": ("p10", "p90")}
            columns = {
                f"{key}_{end}_share": value
                for key, both in found.items()
                for end, value in zip(ends.get(key, ("median", "p90")), both.tolist(), strict=True)
            }
            bench.row("errors", device=device, tp=tp, steps=name, number=len(rows), **columns)
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
