"""Times gapless beside vLLM's CPU build and the machine's floor, by turns: `python -m benchmarks.peer --vllm PYTHON`.

32 requests with prompts of 128 to 512 tokens and 64 greedy output tokens each, all there at the start, in float32, on
one process, over two pipeline stages and over two tensor-parallel ranks, on all cores. Both engines get the same
weights (random, saved as a Hugging Face folder) and the same token ids, and must give the same tokens.

The floor is what the matrix products must take: their FLOPs, over the rate of products of 256 rows with the model's own
weights, laid out for oneDNN and cold, measured in each round. Attention, norms and reading weights for few rows are not
in it.

`start` is from the start of the process to the first token of a first prompt. `MB` is the peak of the memory that its
processes have for themselves, shared pages divided among them.

`--vllm` is the Python of an environment with vLLM's CPU build; without it gapless runs alone. Words after the options
are gapless overrides, as `scheduler=equal_time`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gapless.models

from .support.processes import tree_memory
from .support.results import add_json_option, write_json

GRIDS = {"one": (1, 1), "pp2": (2, 1), "tp2": (1, 2)}
ENGINES = Path(__file__).parent / "support"
LIMIT_S = 900


@dataclass(frozen=True)
class Model:
    """A model's shape, and the Hugging Face config that makes it."""

    kind: str
    keys: dict[str, Any]

    def save(self, folder: Path) -> None:
        import torch
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{self.kind}Config")(**self.keys)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Shipped:
    """The model of the package."""

    def save(self, folder: Path) -> None:
        shutil.copytree(Path(gapless.models.__path__[0]) / "shipped", folder)


MODELS = {
    "shipped": Shipped(),
    "llama-12x768": Model("Llama", {
        "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "initializer_range": 0.05,
    }),
    "gpt2": Model("GPT2", {"initializer_range": 0.05, "bos_token_id": 1, "eos_token_id": 2}),
    "llama-1b": Model("Llama", {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048,
        "tie_word_embeddings": True, "initializer_range": 0.05,
    }),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=Path, metavar="PYTHON")
    parser.add_argument("--model", choices=MODELS, default="llama-12x768")
    parser.add_argument("--grids", default=",".join(GRIDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, nargs=2, default=(128, 512), metavar=("LEAST", "MOST"))
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("overrides", nargs="*")
    add_json_option(parser)
    arguments = parser.parse_args()
    grids = arguments.grids.split(",")
    lengths = np.random.default_rng(0).integers(arguments.prompt[0], arguments.prompt[1] + 1, arguments.requests)
    engines = ["gapless", *(["vllm"] if arguments.vllm else [])]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    floors: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        MODELS[arguments.model].save(folder)
        job = {
            "model": str(folder), "prompts": str(Path(scratch, "prompts.json")), "output": arguments.output,
            "chunk": arguments.chunk, "overrides": dict(word.split("=", 1) for word in arguments.overrides),
        }  # fmt: skip
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        ids = np.random.default_rng(1)
        Path(job["prompts"]).write_text(json.dumps([ids.integers(5, vocabulary, n).tolist() for n in lengths]))
        for number in range(arguments.rounds):
            floors.append(run("floor", sys.executable, job, (1, 1)))
            for name in grids:
                for engine in engines if number % 2 == 0 else engines[::-1]:
                    python = str(arguments.vllm) if engine == "vllm" else sys.executable
                    found = run(engine, python, job, GRIDS[name])
                    runs.setdefault((name, engine), []).append(found)
                    said = f"round {number + 1}: {name}, {engine}: {found['seconds']:.2f} s"
                    print(said, file=sys.stderr, flush=True)
    rate = statistics.median(each["gflops"] for each in floors)
    tokens = int(lengths.sum()) + arguments.requests * (arguments.output - 1)
    flops = tokens * floors[0]["flops_a_token"] + arguments.requests * arguments.output * floors[0]["flops_a_sample"]
    floor = flops / rate / 1e9
    print(f"{arguments.model}: {arguments.requests} requests, {lengths.sum()} prompt and "
          f"{arguments.requests * arguments.output} output tokens, {flops / 1e12:.2f} TFLOP")  # fmt: skip
    rates = ", ".join(f"{each['gflops']:.0f}" for each in floors)
    print(f"floor: {floor:.2f} s at {rate:.0f} GFLOP/s (rounds: {rates})")
    print(f"{'':<14}{'seconds':>9}{'least':>8}{'most':>8}{'out tok/s':>11}{'x vLLM':>8}{'of floor':>10}"
          f"{'start':>8}{'MB':>7}  tokens")  # fmt: skip
    rows = []
    for (name, engine), found in runs.items():
        seconds = [each["seconds"] for each in found]
        middle = statistics.median(seconds)
        peer = runs.get((name, "vllm"))
        ratio = statistics.median(each["seconds"] for each in peer) / middle if peer else None
        same = len({each["tokens"] for key, each_run in runs.items() for each in each_run}) == 1
        row = {
            "grid": name, "engine": engine, "seconds": middle, "least_s": min(seconds), "most_s": max(seconds),
            "output_tokens_per_s": arguments.requests * arguments.output / middle, "times_vllm": ratio,
            "of_floor_share": floor / middle, "start_s": statistics.median(each["start"] for each in found),
            "peak_mb": max(each["mb"] for each in found), "same_tokens": same,
        }  # fmt: skip
        rows.append(row)
        shown = f"{ratio:.2f}" if ratio else "-"
        print(f"{name + ', ' + engine:<14}{middle:>9.2f}{min(seconds):>8.2f}{max(seconds):>8.2f}"
              f"{row['output_tokens_per_s']:>11.1f}{shown:>8}{floor / middle:>10.0%}{row['start_s']:>8.1f}"
              f"{row['peak_mb']:>7.0f}  {'same' if same else 'differ'}")  # fmt: skip
    floor_row = {"seconds": floor, "gflops": rate, "tflop": flops / 1e12}
    write_json(arguments.json, "peer", {"floor": [floor_row], "runs": rows})
    return 0


def run(engine: str, python: str, job: dict[str, Any], grid: tuple[int, int]) -> dict[str, Any]:
    """Run one engine in a process of its own; it prints `first` at its first token, then its numbers as JSON."""
    pp, tp = grid
    cores = os.cpu_count() or 1
    environment = dict(os.environ)
    if engine == "vllm":
        each = cores // (pp * tp)
        binding = "|".join(f"{r * each}-{(r + 1) * each - 1}" for r in range(pp * tp))
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": binding, "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    start, most = 0.0, 0.0
    words = [python, str(ENGINES / f"peer_{engine}.py"), json.dumps(job | {"pp": pp, "tp": tp})]
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "out"), Path(folder, "log")
        with out.open("w") as stdout, log.open("w") as stderr:
            process = subprocess.Popen(words, env=environment, stdout=stdout, stderr=stderr)
        try:
            while process.poll() is None and time.perf_counter() - began < LIMIT_S:
                if not start and "first\n" in out.read_text():
                    start = time.perf_counter() - began
                most = max(most, tree_memory(process.pid))
                time.sleep(1.0 if start else 0.1)
        finally:
            process.kill()
        if process.wait():
            raise SystemExit(f"{engine} failed:\n{log.read_text()[-3000:]}")
        lines = out.read_text().splitlines()
    found: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    if "outputs" in found:
        found["tokens"] = hashlib.md5(json.dumps(found.pop("outputs")).encode()).hexdigest()
    return found | {"start": start, "mb": most / 1e6}


if __name__ == "__main__":
    sys.exit(main())
