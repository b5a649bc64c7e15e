"""Records torch profiler traces of vLLM's CPU build over stages: `python -m benchmarks.vllm_trace --vllm PYTHON`.

A LLaMA with random weights serves one workload. FOLDER gets a trace per rank, and `engine.log` with vLLM's iteration
log; `gapless report import=kineto FOLDER` reads them.

| workload | what is planted |
| --- | --- |
| `mixed` | prompts of 32 to 512 tokens among decodes |
| `uneven` | the same requests, three quarters of the layers on the first stage |
| `starved` | one request at a time, with a pause before each |

`--vllm` is the Python of an environment with vLLM's CPU build. `--seed` draws lengths and tokens, so anyone can record
a new trace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .peer import LIMIT_S, SCRIPTS, llama, vllm_environment
from .support.harness import Benchmark, scratch

LAYERS, VOCABULARY = 8, 4096
WORKLOADS = ("mixed", "uneven", "starved")


def main() -> int:
    given = Benchmark(
        __doc__,
        vllm={"type": Path, "metavar": "PYTHON", "required": True},
        workload={"choices": WORKLOADS, "default": "mixed"},
        requests=12,
        output={"type": int, "default": 24, "help": "maximum output tokens per request"},
        stages=2,
        chunk={"type": int, "default": 256, "help": "maximum tokens per micro-batch"},
        seqs={"type": int, "default": 8, "help": "maximum requests per micro-batch"},
        seed=0,
        out={"type": Path, "metavar": "FOLDER", "help": "default: runs/vllm_trace/WORKLOAD"},
    ).given
    folder = (given.out or Path("runs", "vllm_trace", given.workload)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.pt.trace.json*")):
        raise SystemExit(f"{folder}: already contains traces; choose another --out")
    profiler = {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False}
    keys = {
        "max_num_batched_tokens": given.chunk,
        "max_num_seqs": given.seqs,
        "pipeline_parallel_size": given.stages,
        "distributed_executor_backend": "mp",
        "enable_logging_iteration_details": True,
        "disable_log_stats": False,
        "profiler_config": profiler | {"detailed_trace_annotation": True},
    }
    cores = [str(n % (os.cpu_count() or 1)) for n in range(given.stages)]
    environment = os.environ | vllm_environment(cores)
    if given.workload == "uneven":
        rest = LAYERS // 4 // (given.stages - 1)
        split = [LAYERS - rest * (given.stages - 1)] + [rest] * (given.stages - 1)
        environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, split))
    with scratch() as files, (folder / "engine.log").open("w") as log:
        llama(VOCABULARY, 512, 1536, LAYERS, 8, 4)(files / "model")
        (files / "rounds.json").write_text(json.dumps(workload(given)))
        job = {"model": str(files / "model"), "rounds": str(files / "rounds.json"), "keys": keys}
        command = [str(given.vllm), str(SCRIPTS / "peer_vllm.py"), json.dumps(job)]
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=LIMIT_S, check=False)
    if done.returncode:
        print((folder / "engine.log").read_text()[-3000:], file=sys.stderr)
        return 1
    print(*sorted(folder.glob("*.pt.trace.json*")), sep="\n")
    return 0


def workload(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return rounds of requests, which run one after another, each after a `pause` in seconds."""
    random = np.random.default_rng(arguments.seed)

    def request() -> dict[str, Any]:
        prompt = random.integers(5, VOCABULARY, random.integers(32, 513)).tolist()
        return {"prompt": prompt, "output": int(random.integers(arguments.output // 2, arguments.output + 1))}

    requests = [request() for _ in range(arguments.requests)]
    if arguments.workload == "starved":
        return [{"pause": 0.3, "requests": [one]} for one in requests[:4]]
    return [{"pause": 0.0, "requests": requests}]


if __name__ == "__main__":
    sys.exit(main())
