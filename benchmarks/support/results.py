"""Writes a benchmark's numbers as JSON: `--json FILE` of the commands, and `benchmarks/results/NAME.json`.

A file contains the benchmark, its command and a list of measurements. A measurement has a commit, date, machine and
tables: lists of rows by name. The suffix of a key is its unit; a `_share` of 1 is 100%.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")


def write_json(
    path: Path | None, benchmark: str, tables: Mapping[str, Sequence[Mapping[str, Any]]], device: str = ""
) -> None:
    """Write the tables of one measurement, if `path` is given. `device` is the accelerator, if any."""
    if path is None:
        return
    where = f"{device}; {machine()}" if device else machine()
    measurement = {"commit": commit(), "date": f"{date.today()}", "machine": where, "tables": tables}
    command = shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]])
    result = {"benchmark": benchmark, "command": command, "measurements": [measurement]}
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """Return the checked-out commit, with a `+` if the tree is dirty."""
    describe = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        found = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return "unknown"
    return found.stdout.strip() or "unknown"


def machine() -> str:
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"
