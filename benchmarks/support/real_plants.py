"""Problems planted in a real pipeline of two stages, one thread each, with controls: overrides of `gapless bench`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from gapless.conf.schema import BenchConfig
from gapless.launch.compose import compose_one
from gapless.launch.turns import requests
from gapless.runtime.core.run_record import RunRecord
from gapless.runtime.engine.llm import LLM

from .plants import Plant, among
from .real_pipeline import MACHINE

_HOG, _SLOW, _DISK = "hog", "slow card", "slow disk"
_BASE = (
    f"{MACHINE} hardware.memory_gib=3 scheduler=sarathi scheduler.chunk=128 scheduler.max_batch=8 workload=fixed "
    "workload.input_len=256 workload.output_len=24 workload.range_ratio=0.5 workload.num_prompts=40"
)
_RANK_1 = """
if rank == 1:
    import time
    from gapless.runtime.pipeline.stage_worker import StageWorker
    forward, steps = StageWorker.forward, []
    def slow(self, *arguments):
        begin = time.perf_counter()
        out = forward(self, *arguments)
        steps.append(time.perf_counter() - begin)
        time.sleep({seconds})
        return out
    StageWorker.forward = slow
"""
_SLEEPS = {  # of the second rank after each forward pass, in seconds
    _SLOW: "0.6 * steps[-1]",
    _DISK: "1.0 if len(steps) <= 3 else 0.0",  # as if its weights were still being read from disk
}


def real_plants() -> list[Plant]:
    """Return the plants. `real_run` makes the problems that no override can."""
    long, usual = among(256, 40, 1600, 7, 24)
    return [
        Plant(_HOG, "real", _BASE, ""),
        Plant(_SLOW, "real", _BASE, ""),
        Plant(_DISK, "real", f"{_BASE} workload.seed=1", ""),
        Plant("small KV", "real", _BASE, "cache.num_blocks=60", undo="cache.num_blocks=null"),
        Plant(
            "small chunk", "real", f"{_BASE} workload.output_len=8", "scheduler.chunk=16", undo="scheduler.chunk=128"
        ),
        Plant("few clients", "real", _BASE, "workload.max_concurrency=1", undo="workload.max_concurrency=null"),
        Plant("long prompt", "real", _BASE.split(" workload=")[0], long, usual),
        Plant("split", "real", _BASE, "parallel.layers=[9,3]", undo="parallel.layers=null"),
    ]


def real_healthy() -> list[Plant]:
    """Return runs that no change improves much, as plants without a problem."""
    fixed = "workload=fixed workload.range_ratio=0.5"
    several = {
        "as it comes": f"{fixed} workload.input_len=256 workload.output_len=24 workload.num_prompts=40",
        "lengths vary": "workload=zipf workload.min_len=64 workload.max_len=1024 workload.num_prompts=30",
        "prompts": f"{fixed} workload.input_len=1000 workload.output_len=4 workload.num_prompts=16",
        "decodes": f"{fixed} workload.input_len=24 workload.output_len=96 workload.num_prompts=32",
        "open loop": f"{fixed} workload.input_len=200 workload.output_len=24 workload.num_prompts=30 "
        "workload.request_rate=2",
        "sarathi": f"{fixed} workload.input_len=200 workload.output_len=24 workload.num_prompts=40 scheduler=sarathi",
        "single request": f"{fixed} workload.input_len=400 workload.output_len=100 workload.num_prompts=1",
        "one stage": f"parallel=pp1 {fixed} workload.input_len=256 workload.output_len=24 workload.num_prompts=40",
    }
    return [Plant(name, "real", f"{MACHINE} hardware.memory_gib=3 {keys}", "") for name, keys in several.items()]


def real_run(plant: Plant, *, is_control: bool) -> tuple[RunRecord, BenchConfig]:
    """Run a plant or its control on its own ranks."""
    from tests.support.process_launcher import ProcessLauncher

    config = compose_one(plant.without if is_control else plant.planted, BenchConfig, "bench")
    sleep = None if is_control else _SLEEPS.get(plant.kind)
    slow = _RANK_1.format(seconds=sleep) if sleep else ""
    workload, _ = requests(config)
    with LLM.from_config(config, launcher=ProcessLauncher(slow)) as llm:
        if plant.kind != _DISK:
            for _ in llm.replay([*workload][:2]):
                pass
            llm.reset(config.scheduler)
        with hogs(2 if plant.kind == _HOG and not is_control else 0):
            for _ in llm.replay(workload, config.workload):
                pass
        return llm.record, config


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Keep `count` cores busy."""
    several = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in several:
            hog.kill()
            hog.wait()
