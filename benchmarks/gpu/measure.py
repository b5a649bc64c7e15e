"""Runs the parts of a list: command line, time limits and table."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..support.results import write_json
from .parts import LISTS, Part, Task, chosen
from .rows import Row, json_tables, missing, page, summary, table
from .worker import Worker

LEAST_S = 5.0  # minimum time for starting a part
ON_A_CPU = 4  # factor on time limits


def main(description: str) -> int:
    """Run the list of the command line; return 1 if something failed or GPUs are missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=description)
    parser.add_argument("list", choices=[*LISTS, "gather"], help="gather FOLDER: the wheels that first needs")
    parser.add_argument("--only", default="", metavar="NAME,...", help="only these parts, and those that they need")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write table and JSON there, named after the device")
    parser.add_argument("--seconds", type=float, help="time limit of the list, instead of its own")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--runs", type=Path, default=Path("runs/gpu"), metavar="FOLDER", help="for profiles and runs")
    arguments = parser.parse_args()
    wanted = LISTS[arguments.list]
    try:
        parts = chosen(arguments.list, [name for name in arguments.only.split(",") if name])
    except ValueError as error:
        parser.error(str(error))
    if arguments.device == "cpu" and not arguments.small:
        parser.error("--device cpu: a model of 13B takes hours there; add --small")
    try:
        device, machine = found(arguments.device, wanted.devices)
    except LookupError as error:
        print(f"benchmarks.gpu {arguments.list}: {error}; --device cpu --small runs it at tiny sizes")
        return 1
    began = time.monotonic()
    rows: list[Row] = []
    name = f"gpu_{arguments.list}_{re.sub('[^a-z0-9]+', '_', device.lower()).strip('_')}"
    task = Task(arguments.device, arguments.small, arguments.runs.resolve(), ())
    stretch = ON_A_CPU if arguments.device == "cpu" else 1
    parts = [replace(part, budget_s=stretch * part.budget_s) for part in parts]
    for row in run(parts, task, arguments.seconds or stretch * wanted.total_s):
        rows.append(row)
        _say("  " + "  ".join(cell for cell in row.cells[1:] if cell))
        if arguments.out is not None:  # after each row, since the machine may be lost
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_json(arguments.out / f"{name}.json", "gpu", json_tables(rows), machine)
            (arguments.out / f"{name}.md").write_text(page(arguments.out / f"{name}.json", rows), encoding="utf-8")
    print(f"{machine}\n{table(rows)}\n{summary(rows)}, {time.monotonic() - began:.0f} s")
    return 1 if any(row.status == "FAIL" for row in rows) else 0


def run(parts: list[Part], task: Task, seconds: float) -> Iterator[Row]:
    """Run parts in order and yield their rows. A part for which no time is left yields a failure."""
    end, worker, rows = time.monotonic() + seconds, Worker(), list[Row]()
    try:
        for part in parts:
            left = end - time.monotonic()
            if left < LEAST_S:
                yield missing(part.name, part.name, "", f"not run: the {seconds:g} s of the list have passed")
                continue
            budget_s = min(part.budget_s, left)
            _say(f"{part.name}: at most {budget_s:.0f} s, {seconds - left:.0f} s so far")
            for row in worker.run(replace(part, budget_s=budget_s), replace(task, found=tuple(rows))):
                rows.append(row)
                yield row
    finally:
        worker.stop()


def found(device: str, devices: int) -> tuple[str, str]:
    """Return the device's name, and a line with the name and versions.

    Raises:
        LookupError: there are fewer CUDA devices.
    """
    import torch

    there = torch.cuda.device_count()
    if device == "cuda" and there < devices:
        needed = f"{devices} GPUs are needed, {there} is here" if there else "no CUDA device here"
        raise LookupError(f"{needed} (torch {torch.__version__})")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = {"CUDA": str(torch.version.cuda)} if device == "cuda" else {}
    for package in ("torch", "triton", "xformers", "megatron-core", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return name, ", ".join([name, *(f"{package} {version}" for package, version in versions.items())])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
