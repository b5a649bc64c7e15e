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

import hashlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gapless.models

from .support.harness import Benchmark, Row, by_turns, scratch
from .support.processes import tree_memory
from .support.server import logged

GRIDS = {"one": (1, 1), "pp2": (2, 1), "tp2": (1, 2)}
SCRIPTS = Path(__file__).parent / "support"
LIMIT_S = 900


def save(kind: str, keys: Row, folder: Path) -> None:
    """Save a model of random weights, made of a Hugging Face config."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(initializer_range=0.05, **keys)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def llama(vocabulary: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, tied: bool = False) -> Any:
    """Return a function that saves a LLaMA into a folder."""
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 2048}
    return partial(save, "Llama", sizes | attention | {"tie_word_embeddings": tied})


MODELS: dict[str, Callable[[Path], object]] = {
    "shipped": partial(shutil.copytree, Path(gapless.models.__path__[0]) / "shipped"),
    "llama-12x768": llama(32000, 768, 3072, 12, 12, 4),
    "gpt2": partial(save, "GPT2", {"bos_token_id": 1, "eos_token_id": 2}),
    "llama-1b": llama(128256, 2048, 8192, 16, 32, 8, tied=True),
}


def vllm_environment(cores: list[str]) -> dict[str, str]:
    """Return what vLLM's CPU build needs: the cores of each rank, as `0-1`."""
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores), "HF_HUB_OFFLINE": "1"}


def main() -> int:
    bench = Benchmark(
        __doc__,
        overrides=True,
        vllm={"type": Path, "metavar": "PYTHON"},
        model={"choices": MODELS, "default": "llama-12x768"},
        grids=list(GRIDS),
        rounds=3,
        requests=32,
        prompt=[128, 512],
        output=64,
        chunk=256,
    )
    given = bench.given
    lengths = np.random.default_rng(0).integers(given.prompt[0], given.prompt[1] + 1, given.requests)
    outputs = given.requests * given.output
    with scratch() as folder:
        MODELS[given.model](folder / "model")
        vocabulary = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
        ids = np.random.default_rng(1)
        requests = [{"prompt": ids.integers(5, vocabulary, n).tolist(), "output": given.output} for n in lengths]
        (folder / "rounds.json").write_text(json.dumps([{"pause": 0.0, "requests": requests}]))
        job = {"model": str(folder / "model"), "rounds": str(folder / "rounds.json"), "chunk": given.chunk}
        job["overrides"] = dict(word.split("=", 1) for word in given.overrides)
        pythons = {"gapless": sys.executable, **({"vllm": str(given.vllm)} if given.vllm else {})}
        cases = {
            (g, engine): partial(run, engine, pythons[engine], job, *GRIDS[g])
            for g in given.grids
            for engine in pythons
        }
        runs = by_turns(given.rounds, {("one", "floor"): partial(run, "floor", sys.executable, job, 1, 1), **cases})
    floors = runs.pop(("one", "floor"))
    gflops = statistics.median(each["gflops"] for each in floors)
    flops = (int(lengths.sum()) + outputs - given.requests) * floors[0]["flops_a_token"]
    flops += outputs * floors[0]["flops_a_sample"]
    floor = flops / gflops / 1e9
    bench.row("floor", seconds=floor, gflops=gflops, tflop=flops / 1e12, prompt_tokens=int(lengths.sum()))
    same = len({each["tokens"] for found in runs.values() for each in found}) == 1
    middle = {key: statistics.median(each["seconds"] for each in found) for key, found in runs.items()}
    for (grid, engine), found in runs.items():
        seconds, theirs = middle[grid, engine], middle.get((grid, "vllm"))
        bench.row(
            "runs",
            grid=grid,
            engine=engine,
            seconds=seconds,
            least_s=min(each["seconds"] for each in found),
            most_s=max(each["seconds"] for each in found),
            output_tokens_per_s=outputs / seconds,
            times_vllm=theirs / seconds if theirs else None,
            of_floor_share=floor / seconds,
            start_s=statistics.median(each["start"] for each in found),
            peak_mb=max(each["mb"] for each in found),
            same_tokens=same,
        )
    return bench.end()


def run(engine: str, python: str, job: Row, pp: int, tp: int) -> Row:
    """Run one engine in a process of its own; it prints `first` at its first token, then its numbers as JSON."""
    environment: dict[str, str] = {}
    if engine == "vllm":
        each = (os.cpu_count() or 1) // (pp * tp)
        environment = vllm_environment([f"{r * each}-{(r + 1) * each - 1}" for r in range(pp * tp)])
        keys: Row = {"pipeline_parallel_size": pp, "tensor_parallel_size": tp, "max_num_batched_tokens": job["chunk"]}
        job = job | {"keys": keys | ({"distributed_executor_backend": "mp"} if pp * tp > 1 else {})}
    began, start, most = time.perf_counter(), 0.0, 0.0
    command = [python, str(SCRIPTS / f"peer_{engine}.py"), json.dumps(job | {"pp": pp, "tp": tp})]
    with logged(command, environment) as (process, log):
        while process.poll() is None and time.perf_counter() - began < LIMIT_S:
            if not start and "first\n" in log.read_text():
                start = time.perf_counter() - began
            most = max(most, tree_memory(process.pid))
            time.sleep(1.0 if start else 0.1)
        text = log.read_text()
        if process.poll() != 0:
            raise SystemExit(f"{engine} failed:\n{text[-3000:]}")
    found: Row = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    if "outputs" in found:
        found["tokens"] = hashlib.md5(json.dumps(found.pop("outputs")).encode()).hexdigest()
    return found | {"start": start, "mb": most / 1e6}


if __name__ == "__main__":
    sys.exit(main())
