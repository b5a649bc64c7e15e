"""Planted problems drawn by a seed, so that explanations are not judged by plants that they were tuned to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from gapless.conf.errors import ConfigError
from gapless.runtime.explain.twin import values_of
from gapless.runtime.pipeline.protocol import PipelineError

from .plants import EQUAL, ROOTS, Plant, among
from .simulated import configure, replicas_of

_LEAST = {"small": 0.08, "medium": 0.2, "large": 0.5}
_MOST = {"small": 0.16, "medium": 0.42, "large": 0.95}
_MODELS = {"llama-7b": 32, "llama-13b": 40, "mistral-7b": 32, "llama3-8b": 32, "llama-33b": 60, "qwen2-7b": 28}
_SLOWER = {"a100-80g": ("a6000",), "h200": ("h100", "a100-80g"), "h100": ("a100-80g",)}
_TRIES = 12
Problem = tuple[str, str, str]  # overrides that make it, those of the control, and those that undo it


def drawn(seed: int) -> Iterator[Plant]:
    """Yield plants of all kinds, each of a size that its seed draws; kinds that no try gave are left out."""
    for kind in ROOTS:
        chosen = random.Random(f"{seed} {kind}")
        for _ in range(_TRIES):
            if (plant := _plant(kind, chosen.choice([*_LEAST]), chosen)) is not None:
                yield plant
                break


def _plant(kind: str, size: str, chosen: random.Random) -> Plant | None:
    """Draw a setting, and take the weakest problem of the kind that costs enough in it; None: none is of the size."""
    model = chosen.choice([*_MODELS])
    pp, hardware = chosen.choice([2, 4]), chosen.choice(["a100-80g", "a100-80g", "h100", "h200"])
    least = chosen.choice([100, 300, 800])
    base = (
        f"model={model} hardware={hardware} cluster=pcie parallel=pp{pp} workload=zipf workload.min_len={least} "
        f"workload.max_len={least * chosen.choice([2, 4])} workload.pd_ratio={chosen.choice([3, 8, 15])} "
        f"workload.num_prompts={chosen.randrange(80, 200)} workload.seed={chosen.randrange(1000)}"
    )
    policy = EQUAL if kind not in ("small chunk", "large chunk") else "scheduler=token_budget"
    base, problems = _problems(kind, f"{base} {policy}", model, pp, hardware, chosen)
    costs: dict[str, float] = {}

    def seconds(*keys: str) -> float:
        text = " ".join(filter(None, keys))
        if text not in costs:
            costs[text] = max(values_of(each.record)["duration"] for each in replicas_of(configure(text)))
        return costs[text]

    if kind.endswith("chunk"):  # the control is the best size
        usual = min((f"scheduler.budget={256 * 2**n}" for n in range(6)), key=lambda each: seconds(base, each))
        problems = [(problem, usual, usual) for problem, _, _ in problems]
    for problem, control, undo in problems:
        try:
            share = 1 - seconds(base, control) / seconds(base, problem)
        except (ConfigError, PipelineError):  # it does not fit
            continue
        larger = [f"scheduler.chunk={chunk}" for chunk in (512, 1024)] if EQUAL in base else []
        if any(1 - seconds(base, control, each) / seconds(base, control) > share / 3 for each in larger):
            continue  # the chunk is a problem too
        if share >= _LEAST[size]:
            return Plant(kind, size, base, problem, control, undo) if share <= _MOST[size] else None
    return None


def _problems(
    kind: str, base: str, model: str, pp: int, hardware: str, chosen: random.Random
) -> tuple[str, list[Problem]]:
    """Return the setting of a kind, and problems from weak to strong."""
    layers = _MODELS[model]
    even = [layers // pp] * pp
    stage = chosen.randrange(pp)

    def keyed(key: str, values: Sequence[object]) -> list[Problem]:
        return [(f"{key}={value}", "", f"{key}=null") for value in values]

    def moved(count: int) -> str:
        split = [each - count for each in even]
        split[stage] += count * pp
        return ",".join(map(str, split))

    slower = chosen.choice(_SLOWER[hardware])
    devices = ",".join(slower if each == stage else hardware for each in range(pp))
    link = "cluster.node={{least_us:38.34,ramp_us:6.18,gigabytes_per_s:{},knee:1.909}}"
    factor, many = chosen.choice([2, 4, 8]), chosen.choice([1.0, 1.5])
    prompt = chosen.choice([300, 600])
    plain = base.split(" workload=")[0]
    long = [among(prompt, 150, length, 40, 60) for length in (4000, 8000, 16_000, 30_000, 60_000, 100_000)]
    kinds: dict[str, Callable[[], tuple[str, list[Problem]]]] = {
        "link": lambda: (base, [(link.format(0.8 * 0.7**n), "", "") for n in range(12)]),
        "split": lambda: (base, keyed("parallel.layers", [f"[{moved(n)}]" for n in range(1, even[0])])),
        "slow card": lambda: (
            f"{base} parallel.layers=[{','.join(map(str, even))}] cache.num_blocks=8000",
            [(f"simulation.devices=[{devices}]", "", "parallel.layers=null")],
        ),
        "small chunk": lambda: (base, keyed("scheduler.budget", [160, 128, 96, 64, 48, 32, 24, 16])),
        "large chunk": lambda: (base, keyed("scheduler.budget", [4096 * 2**n for n in range(5)])),
        "few clients": lambda: (
            base,
            keyed("workload.max_concurrency", [64, 48, 40, 32, 26, 20, 16, 12, 8, 6, 4, 3, 2]),
        ),
        "overload": lambda: (base, [*_overloads(chosen)]),
        "small KV": lambda: (
            f"{base} workload.pd_ratio=60",
            keyed("cache.num_blocks", [int(3000 * 0.85**n) for n in range(20)]),
        ),
        "preemption": lambda: (
            f"{base} workload.pd_ratio=0.5",
            keyed("cache.num_blocks", [int(8000 * 0.85**n) for n in range(24)]),
        ),
        "hog": lambda: (
            base,
            [
                (f"simulation.straggler_rate={0.01 * many * 1.4**n} simulation.straggler_factor={factor}", "", "")
                for n in range(10)
            ],
        ),
        "long prompt": lambda: (
            f"{plain} {EQUAL} scheduler.chunk=1024 model.architecture.max_position=131072",
            [(problem, control, "") for problem, control in long],
        ),
        "policy": lambda: (
            base.replace(f" {EQUAL}", ""),
            [
                (f"scheduler={name}", EQUAL, EQUAL)
                for name in chosen.sample(["orca_best", "request_level", "prefill_first", "orca_worst"], 4)
            ],
        ),
    }
    return kinds[kind]()


def _overloads(chosen: random.Random) -> Iterator[Problem]:
    start = chosen.choice([4, 6])
    for n in range(12):
        rate = f"workload.request_rate={start * 1.5**n:.3g}"
        yield rate, f"{rate} simulation.replicas=8", ""
