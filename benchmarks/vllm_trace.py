"""Records torch profiler traces of vLLM's CPU build over stages: `python -m benchmarks.vllm_trace --vllm PYTHON`.

A llama of random weights serves one workload. FOLDER gets a trace of each rank, and `engine.log` with vLLM's iteration
log; `gapless report import=kineto FOLDER` reads them.

| workload | what is planted |
| --- | --- |
| `mixed` | prompts of 32 to 512 tokens among decodes |
| `uneven` | the same requests, three quarters of the layers on the first stage |
| `starved` | one request at a time, with a pause before each |

`--vllm` is the Python of an environment with vLLM's CPU build. A seed draws lengths and tokens, so that anybody can
record a trace that nobody has seen.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .peer import LIMIT_S, Model

LAYERS, VOCABULARY = 8, 4096
MODEL = Model("Llama", {
    "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "initializer_range": 0.05,
})  # fmt: skip
WORKLOADS = ("mixed", "uneven", "starved")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", required=True)
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--output", type=int, default=24, help="output tokens of a request, at most")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=256, help="most tokens of a micro-batch")
    parser.add_argument("--seqs", type=int, default=8, help="most requests of a micro-batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: runs/vllm_trace/WORKLOAD")
    arguments = parser.parse_args()
    folder = (arguments.out or Path("runs", "vllm_trace", arguments.workload)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.pt.trace.json*")):
        raise SystemExit(f"{folder}: holds traces already")
    with tempfile.TemporaryDirectory() as scratch:
        model, rounds = Path(scratch, "model"), Path(scratch, "rounds.json")
        MODEL.save(model)
        rounds.write_text(json.dumps(workload(arguments)))
        job = {
            "model": str(model), "rounds": str(rounds), "folder": str(folder), "stages": arguments.stages,
            "chunk": arguments.chunk, "seqs": arguments.seqs,
        }  # fmt: skip
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(n % (os.cpu_count() or 1)) for n in range(arguments.stages)),
        }  # fmt: skip
        if arguments.workload == "uneven":
            rest = LAYERS // 4 // (arguments.stages - 1)
            split = [LAYERS - rest * (arguments.stages - 1)] + [rest] * (arguments.stages - 1)
            environment["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, split))
        words = [str(arguments.vllm), str(Path(__file__).parent / "support" / "trace_vllm.py"), json.dumps(job)]
        with Path(folder, "engine.log").open("w") as log:
            done = subprocess.run(words, env=environment, stdout=log, stderr=log, timeout=LIMIT_S, check=False)
    if done.returncode:
        print(Path(folder, "engine.log").read_text()[-3000:], file=sys.stderr)
        return 1
    print(*sorted(folder.glob("*.pt.trace.json*")), sep="\n")
    return 0


def workload(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of requests, each with seconds of `pause` before it; the next round begins when all of one are done."""
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
