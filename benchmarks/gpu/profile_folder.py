"""A profile of the device by `gapless profile`, and simulations with it by `gapless simulate`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

from gapless.launch.cli import main as gapless
from gapless.runtime.simulation.cost.profile_folder import ProfileFolder
from gapless.runtime.simulation.profiling.prediction_error import held_out_errors

from ..paper import config_of
from ..paper.run import run
from .parts import Task
from .rows import Row, of_paper

PROFILE, RUNS = "profile", "simulate"  # below a task's folder
LAYERS = 4  # of the profile; enough that weights exceed a GPU's cache
# The closest hardware config by device name; a profile uses only its tile size.
HARDWARE = {"H200": "h200", "H100": "h100", "A100": "a100-80g", "A6000": "a6000"}
LONGEST = 4096  # tokens; the figure has requests of 3K
POLICIES = ("orca_best", "sarathi", "equal_time")


def profile(task: Task) -> Iterator[Row]:
    """Profile four layers into `profile/`, which `simulation.profile` takes."""
    folder = task.folder / PROFILE
    shutil.rmtree(folder, ignore_errors=True)
    model = _model(task)
    sizes = (
        ["max_tokens=64", "max_decodes=4", "samples=1"]
        if task.small
        else [f"num_layers={LAYERS}", "max_tokens=1024", "max_context=2048", "samples=3"]
    )
    _gapless("profile", *model, *sizes, "pipeline=false", f"hydra.run.dir={folder}")
    samples = ProfileFolder(folder).operators()
    yield Row(
        part="profile",
        quantity="measurements",
        value=len(samples),
        note=f"gapless simulate {' '.join(model)} simulation.profile={folder}",
    )
    for error in held_out_errors(samples):
        yield Row(
            part="profile",
            quantity=f"{error.what}, median error of left-out points",
            setting=f"{error.points} points",
            value=error.median,
        )


def simulate(task: Task) -> Iterator[Row]:
    """Simulate policies on a workload, and the paper's Figure 13, with the profile."""
    folder = task.folder / RUNS
    shutil.rmtree(folder, ignore_errors=True)
    setting = (*_model(task), f"simulation.profile={task.folder / PROFILE}")
    sizes = (64, 16, 8) if task.small else (1024, 128, 200)
    workload = [f"workload.{key}={n}" for key, n in zip(("input_len", "output_len", "num_prompts"), sizes, strict=True)]
    _gapless(
        "simulate",
        *setting,
        f"scheduler={','.join(POLICIES)}",
        "workload=fixed",
        *workload,
        f"hydra.run.dir={folder / 'policies'}",
    )
    number = f"{sizes[2]} requests of {sizes[0]} + {sizes[1]}"
    for policy in POLICIES:
        (path,) = (folder / "policies").glob(f"*_{policy}/summary.json")
        summary = json.loads(path.read_text(encoding="utf-8"))
        yield Row(
            part="simulate",
            quantity="output tokens/s",
            setting=f"{policy}, {number}",
            value=summary["output_throughput"],
        )
    config = config_of("figure13", [*setting, f"workload.num_prompts={18 if task.small else 90}"])
    rows = run("figure13", config, folder / "figure13").rows
    yield from of_paper(
        "simulate",
        [row for row in rows if row.quantity.startswith("throughput")],
        "Figure 13, from the profile",
    )


def _model(task: Task) -> tuple[str, ...]:
    """Return the overrides of model and device, with fewer layers if not all fit into memory."""
    if task.small:
        return (
            "model=tiny",
            f"model.architecture.max_position={LONGEST}",
            "hardware=cpu",
            "hardware.memory_gib=4",
            "parallel=local",
        )
    import torch

    from .model import KV_TOKENS, architecture, layers_that_fit

    name = torch.cuda.get_device_name() if task.device == "cuda" else ""
    hardware = next((config for part, config in HARDWARE.items() if part in name), "h100")
    memory = torch.cuda.mem_get_info()[1] / 2**30 * 0.9
    layers = layers_that_fit(architecture("llama-13b", small=False), task.device, KV_TOKENS)
    torch.cuda.empty_cache()
    return (
        "model=llama-13b",
        "model.dtype=bfloat16",
        f"model.architecture.num_layers={layers}",
        f"hardware={hardware}",
        f"hardware.memory_gib={memory:.1f}",
        "parallel=local",
    )


def _gapless(*command: str) -> None:
    """Run a command of gapless.

    Raises:
        RuntimeError: it failed; it has printed why.
    """
    if code := gapless(command):
        raise RuntimeError(f"gapless {command[0]} ended with {code}; standard error says why")
