"""Has two hosts lose each other for a while: `python -m benchmarks.two_hosts`. As root, on Linux with `ip`.

Two network namespaces of this machine, joined by a virtual cable, stand for two hosts. Each has a stage of a pipeline:
under Ray a Ray node each, under torchrun an agent each. `gapless generate` runs in the first one. Some seconds later
the cable is unplugged, and plugged in again. `longest` is the longest time without a token. Each text is compared with
that of a run on one host without a pipeline. Five minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from gapless import LLM, SamplingParams
from gapless.runtime.run_folder.read import read_run_folder

from .support.harness import Benchmark, Row, say, scratch, words

HOSTS = ("10.77.0.1", "10.77.0.2")
GCS_PORT, TORCHRUN_PORT = 6379, 29501
RUN = (
    "model=tiny parallel.threads=1 sampling.max_tokens=1200 sampling.ignore_eos=true cache.num_blocks=1024 "
    "print_texts=false"
)
PROMPTS = [f"{number} times {number} are " for number in range(1, 65)]
_TIE = 1e-4  # of log-probabilities, within which rounding decides
_UNPLUG_AFTER_S = 3.0  # of the run
_RUN_S = 240
_TOKEN = {"RAY_AUTH_MODE": "token"}  # which Ray asks of whoever comes from another address


def main() -> int:
    bench = Benchmark(__doc__, unplugged=[4.0, 14.0], launchers=["ray", "torchrun"])
    given, starts = bench.given, {"ray": start_ray, "torchrun": start_torchrun}
    if os.geteuid() != 0 or shutil.which("ip") is None:
        say("benchmarks.two_hosts: needs root and the command `ip`, to make network namespaces")
        return 2
    runs: list[tuple[str, float, Path, int]] = []
    with scratch() as folder:
        (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
        command = [sys.executable, "-m", "gapless.launch.cli", *generate(folder, "expected", "parallel=local")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        expected = texts(folder / "expected")
        for launcher in given.launchers:
            for seconds in (0.0, *given.unplugged):
                out = f"{launcher}_{seconds:g}"
                with two_namespaces() as spaces:
                    run = starts[launcher](spaces, folder, out)
                    unplug(run, spaces, folder / f"{out}.log", seconds)
                    code = run.wait(_RUN_S)
                runs.append((launcher, seconds, folder / out, code))
                if code:
                    say((folder / f"{out}.log").read_text()[-6000:])
        for each in runs:  # at last: an LLM in this process binds what it starts to loopback
            bench.row("two_hosts", **row(*each, expected))
    return bench.end()


def generate(folder: Path, out: str, *keys: str) -> list[str]:
    return ["generate", *words(RUN, f"prompts={folder / 'prompts.txt'}", f"hydra.run.dir={folder / out}", *keys)]


def texts(folder: Path) -> list[Any]:
    lines = (folder / "outputs.jsonl").read_text().splitlines()
    return [[output["token_ids"] for output in json.loads(line)["outputs"]] for line in lines]


@contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Make two network namespaces with a cable between them; end all that runs in them, and them, at the end."""
    spaces = [f"gapless{os.getpid()}{side}" for side in "ab"]
    cables = [f"gl{os.getpid()}{side}" for side in "ab"]
    try:
        for space in spaces:
            ip(f"netns add {space}")
        ip(f"link add {cables[0]} netns {spaces[0]} type veth peer name {cables[1]} netns {spaces[1]}")
        for space, cable, host in zip(spaces, cables, HOSTS, strict=True):
            ip(f"-n {space} addr add {host}/24 dev {cable}")
            ip(f"-n {space} link set {cable} up")
            ip(f"-n {space} link set lo up")
        yield spaces
    finally:
        for space in spaces:
            found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout
            for pid in map(int, found.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], check=False)


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def within(space: str, command: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a namespace."""
    command = ["ip", "netns", "exec", space, *command]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environment)


def start_ray(spaces: Sequence[str], folder: Path, out: str) -> subprocess.Popen[bytes]:
    log, ray = folder / f"{out}.log", str(Path(sys.executable).parent / "ray")
    head, address = (
        f"--head --port={GCS_PORT} --include-dashboard=false --disable-usage-stats",
        f"{HOSTS[0]}:{GCS_PORT}",
    )
    environment = {"RAY_TMPDIR": tempfile.mkdtemp(dir=folder)}
    for space, host, which in zip(spaces, HOSTS, (head, f"--address={address}"), strict=True):
        command = [ray, "start", *which.split(), f"--node-ip-address={host}", "--num-cpus=1"]
        if code := within(space, command, log, environment).wait(60):
            raise SystemExit(f"ray start ended with {code}: {log.read_text()[-2000:]}")
        environment |= _TOKEN
    command = generate(folder, out, f"parallel=pp2 parallel.ray_address={address} parallel.host={HOSTS[0]}")
    return within(spaces[0], [sys.executable, "-m", "gapless.launch.cli", *command], log, environment)


def start_torchrun(spaces: Sequence[str], folder: Path, out: str) -> subprocess.Popen[bytes]:
    command = generate(folder, out, f"parallel=pp2 parallel.host={HOSTS[0]}")
    agents = []
    for rank, space in enumerate(spaces):
        agent = (
            f"-m torch.distributed.run --nnodes 2 --node-rank {rank} --nproc-per-node 1 --master-addr {HOSTS[0]} "
            f"--master-port {TORCHRUN_PORT} -m gapless.launch.torchrun"
        )
        agents.append(within(space, [sys.executable, *agent.split(), *command], folder / f"{out}.log", {}))
    return agents[0]


def unplug(run: subprocess.Popen[bytes], spaces: Sequence[str], log: Path, seconds: float) -> None:
    """Take the cable out some seconds after the ranks stand."""
    deadline = time.monotonic() + 90
    while b"load their shards" not in log.read_bytes():
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the ranks do not stand: {log.read_text()[-2000:]}")
        time.sleep(0.1)
    time.sleep(_UNPLUG_AFTER_S)
    if seconds:
        cable = f"gl{os.getpid()}a"
        ip(f"-n {spaces[0]} link set {cable} down")
        time.sleep(seconds)
        ip(f"-n {spaces[0]} link set {cable} up")


def ties(number: int, one: list[int], other: list[int]) -> bool:
    """Return whether the first token that differs is as likely as the one in its place.

    Micro-batches of other sizes round otherwise.
    """
    place = next(at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    with LLM("tiny", **{"parallel.threads": 1}) as llm:
        ids = [*llm.tokenizer.encode(PROMPTS[number]), *one[:place]]
        (output,) = llm.generate([ids], SamplingParams(max_tokens=1, logprobs=5))
    (found,) = output.outputs[0].logprobs or [{}]
    return {one[place], other[place]} <= found.keys() and (
        abs(found[one[place]].logprob - found[other[place]].logprob) < _TIE
    )


def row(launcher: str, seconds: float, folder: Path, code: int, expected: list[Any]) -> Row:
    faults, longest, different, rounding = "the run ended", 0.0, len(expected), 0
    if (folder / "summary.json").exists():
        record = read_run_folder(folder).load()
        times = np.sort(np.concatenate([request.token_times for request in record.requests]))
        longest = float(np.diff(times).max())
        faults = ", ".join(fault.reason for fault in record.faults)
    if (folder / "outputs.jsonl").exists():
        found = texts(folder)
        other = [number for number, text in enumerate(expected) if number >= len(found) or found[number] != text]
        whole = [n for n in other if n < len(found) and len(found[n][0]) == len(expected[n][0])]
        rounding = sum(ties(number, expected[number][0], found[number][0]) for number in whole)
        different = len(other) - rounding
    row = {"launcher": launcher, "unplugged_s": seconds, "longest_s": longest, "after_s": max(0.0, longest - seconds)}
    return row | {"different": different, "rounding": rounding, "exit": code, "faults": faults}


if __name__ == "__main__":
    sys.exit(main())
