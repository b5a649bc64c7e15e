"""Measures one GPU in under eight minutes: `python -m benchmarks.gpu [--out FILE] [--only NAME,...]`.

It checks that results are right; measures the best matrix products and memory rates of the device, and how near a stage
of LLaMA-13B comes to them; the paper's Table 2 and Figures 3, 4, 7, 8 and 13; and a profile folder, with which it
simulates. Weights are random. `--device cpu --small` runs all of it at tiny sizes without a GPU. Without CUDA it says
so and exits with 0; it exits with 1 if a part or a check fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from pathlib import Path

from ..support.results import write_json
from .parts import PARTS, Task, chosen
from .rows import Row, json_tables, table
from .worker import Worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the numbers to this JSON file too")
    parser.add_argument("--only", default="", metavar="NAME,...", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs/gpu"),
        metavar="FOLDER",
        help="for the profile and the simulations (%(default)s)",
    )
    arguments = parser.parse_args()
    try:
        parts = chosen([name for name in arguments.only.split(",") if name])
    except ValueError as error:
        parser.error(str(error))
    if arguments.device == "cpu" and not arguments.small:
        parser.error("--device cpu: a model of 13B takes hours there; add --small")
    machine = _machine(arguments.device)
    if machine is None:
        print("benchmarks.gpu: no CUDA device here; --device cpu --small runs it at tiny sizes")
        return 0
    rows: list[Row] = []
    began, worker = time.monotonic(), Worker()
    try:
        for part in parts:
            _say(f"{part.name}: at most {part.budget_s:g} s, {time.monotonic() - began:.0f} s so far")
            task = Task(arguments.device, arguments.small, arguments.runs.resolve(), tuple(rows))
            for row in worker.run(part, task):
                rows.append(row)
                _say("  " + "  ".join(cell for cell in row.cells[1:] if cell))
            write_json(arguments.out, "gpu", json_tables(rows), machine)
    finally:
        worker.stop()
    print(f"{machine}\n{table(rows)}")
    failed = sum(row.status == "FAIL" for row in rows)
    missed = sum(row.status == "missed" for row in rows)
    print(f"{failed} failed, {missed} goals missed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _machine(device: str) -> str | None:
    """Return the device and the versions in one line; None where CUDA is asked for and not there."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = {"CUDA": str(torch.version.cuda)} if device == "cuda" else {}
    for package in ("torch", "xformers", "megatron-core", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return ", ".join([name, *(f"{package} {version}" for package, version in versions.items())])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
