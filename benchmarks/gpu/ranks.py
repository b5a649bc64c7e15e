"""Runs ranks on two GPUs under torchrun: start, tokens and exit, the death of a rank, and CUDA contexts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .engine import HARDWARE, MEMORY_GIB
from .parts import Task
from .rows import Row, checked, figure

CONTEXTS = ("nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gapless.launch.torchrun")
LOOK_S = 0.2
MARK = "GAPLESS_BENCHMARK"  # environment variable with the process ID of the part


@dataclass(frozen=True, slots=True)
class Done:
    """Results of a command: outputs by prompt, summary, seconds, and the devices of each process."""

    tokens: list[list[int]]
    summary: dict[str, Any]
    seconds: float
    contexts: dict[str, set[str]]


def one(task: Task) -> Iterator[Row]:
    """Run one rank, whose outputs are the reference."""
    path = task.folder / "one.json"
    path.unlink(missing_ok=True)
    done = _run(task, "local", "float32")
    task.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(done.tokens), encoding="utf-8")
    yield figure("one", "whole command (s)", "one rank, float32", done.seconds)


def tp2(task: Task) -> Iterator[Row]:
    """Run two ranks of one stage."""
    yield from _generate(task, "tp2")


def pp2(task: Task) -> Iterator[Row]:
    """Run two stages of one rank."""
    yield from _generate(task, "pp2")


def kill_tp2(task: Task) -> Iterator[Row]:
    """Kill one of two ranks of a stage while requests run."""
    yield from _generate(task, "tp2", killed=1)


def kill_pp2(task: Task) -> Iterator[Row]:
    """Kill the last of two stages while requests run."""
    yield from _generate(task, "pp2", killed=1)


def _generate(task: Task, parallel: str, killed: int | None = None) -> Iterator[Row]:
    """Compare float32 tokens with those of one rank; without a kill, also run with the default type."""
    part, setting = parallel if killed is None else f"kill_{parallel}", f"{parallel}, float32"
    expected = json.loads((task.folder / "one.json").read_text(encoding="utf-8"))
    found = _run(task, parallel, "float32", killed)
    wrong = sum(a != b for a, b in zip(found.tokens, expected, strict=True))
    yield checked(part, "outputs that differ from one rank's", setting, wrong, 0)
    yield figure(part, "whole command (s)", setting, found.seconds)
    yield figure(part, "output tokens/s", setting, found.summary["output_throughput"])
    faults = found.summary["faults"]
    yield checked(part, "unexpected or missing faults", setting, abs(len(faults) - (killed is not None)), 0)
    for fault in faults:
        for name, seconds in fault["parts"].items():
            yield figure(part, f"fault, {name} (s)", setting, seconds)
    if killed is None:
        done = _run(task, parallel, "auto")
        yield figure(part, "whole command (s)", f"{parallel}, dtype=auto", done.seconds)
        yield figure(part, "output tokens/s", f"{parallel}, dtype=auto", done.summary["output_throughput"])
    if task.device == "cuda":
        if not found.contexts:
            note = "nvidia-smi names no process here, as in most containers"
            yield Row(part=part, quantity="contexts", setting=setting, status="skip", note=note)
            return
        several = sum(len(devices) > 1 for devices in found.contexts.values())
        yield checked(part, "processes with contexts on two GPUs", f"of {len(found.contexts)}", several, 0)


def _run(task: Task, parallel: str, dtype: str, killed: int | None = None) -> Done:
    """Run `gapless generate` on prompts, the first of which finish early; kill rank `killed` after the first output.

    Raises:
        RuntimeError: the command failed; the message is its last line.
    """
    lengths = [16, 16, *[200 if task.small else 800] * 6]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [
            json.dumps({"prompt": f"def method_{place}(self, ", "max_tokens": length, "ignore_eos": True})
            for place, length in enumerate(lengths)
        ]
        (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
        command = [
            *(sys.executable, *(("-m", "gapless") if parallel == "local" else TORCHRUN), "generate"),
            *(f"parallel={parallel}", f"model.dtype={dtype}", "model=shipped", f"prompts={folder / 'prompts.jsonl'}"),
            *(f"hardware={HARDWARE[task.device]}", f"hardware.memory_gib={MEMORY_GIB}"),
            *(f"outputs={folder / 'outputs.jsonl'}", f"hydra.run.dir={folder / 'run'}"),
        ]
        began, contexts = time.monotonic(), defaultdict[str, set[str]](set)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {MARK: f"{os.getpid()}"}
            )
            while process.poll() is None:
                if task.device == "cuda":
                    seen = subprocess.run(CONTEXTS, capture_output=True, text=True, check=False).stdout
                    for pid, device in (line.split(", ") for line in seen.splitlines() if ", " in line):
                        contexts[pid].add(device)
                if killed is not None and _size(folder / "outputs.jsonl"):
                    os.kill(_rank_process(killed), signal.SIGKILL)
                    killed = None
                time.sleep(LOOK_S)
        seconds = time.monotonic() - began
        if process.returncode:
            text = (folder / "log").read_text(encoding="utf-8", errors="replace").strip()
            raise RuntimeError(f"exit code {process.returncode}: {(text.splitlines() or [''])[-1]}")
        outputs = [json.loads(line) for line in (folder / "outputs.jsonl").read_text(encoding="utf-8").splitlines()]
        summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    return Done([output["outputs"][0]["token_ids"] for output in outputs], summary, seconds, contexts)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _rank_process(rank: int) -> int:
    """Return the process of a rank of this part, found by its environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            wanted = {b"GAPLESS_ROLE=rank", f"RANK={rank}".encode(), f"{MARK}={os.getpid()}".encode()}
            if wanted <= set(environment):
                return int(folder.name)
        except OSError:  # exited, or another user's
            continue
    raise RuntimeError(f"no process of rank {rank} is there")
