"""Compares gapless with vLLM's CPU build and a GEMM floor in interleaved runs: `python -m benchmarks.peer`.

32 requests with prompts of 128 to 512 tokens and 64 greedy output tokens each, all at once, on one process, over two
pipeline stages and over two tensor-parallel ranks, on all cores, in each type of `--dtype`. Both engines get the same
weights (random, saved as a Hugging Face folder) and the same token ids. `same` is the share of requests whose tokens
equal those of the first run in that type; in float32 it must be 100%.

The floor is the time of the GEMMs alone: their FLOPs / the rate of GEMMs with 256 rows and the model's own weights in
that type, in oneDNN's layout and with cold caches, measured in each round. It does not include attention, norms or
reading weights for few rows.

`start` is from the start of the process to the first token of the first prompt. `MB` is the peak proportional set size
of its processes.

`--vllm` is the Python of an environment with vLLM's CPU build; without it only gapless runs. `--llama`, the Python of
an environment with `llama-cpp-python`, runs another comparison: SmolLM2-135M as GGUF files of several types, or the
files in `--files`, on gapless in each `--dtype` and on llama.cpp, in tokens/s of prefill and of decode, for all
requests and for a single one. Decode time is the total time less prompt time. `--llama build` builds llama.cpp first
and keeps it in the user's cache. Overrides of gapless follow the options, e.g. `scheduler=equal_time`.

`--march x86-64-v3` limits gapless, torch, oneDNN and a build of llama.cpp to an instruction-set level of older
processors, to compare them at that level on a newer machine.
"""

from __future__ import annotations

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
from gapless.kernels.processor import VARIABLE, Level, level, levels
from gapless.models.gguf.smollm2 import smollm2

from .support.harness import Benchmark, Row, by_turns, medians, scratch
from .support.llama_build import build
from .support.processes import tree_memory
from .support.server import logged

GRIDS = {"one": (1, 1), "pp2": (2, 1), "tp2": (1, 2)}
SCRIPTS = Path(__file__).parent / "support"
LIMIT_S = 900
ALONE = 4  # requests that run alone, one at a time


def save(kind: str, keys: Row, folder: Path) -> None:
    """Save a model with random weights, from a Hugging Face config."""
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


def experts(kind: str, vocabulary: int, hidden: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Any:
    """Return a function that saves an MoE model into a folder."""
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 2048}
    return partial(save, kind, sizes | attention | more)


MODELS: dict[str, Callable[[Path], object]] = {
    "shipped": partial(shutil.copytree, Path(gapless.models.__path__[0]) / "shipped"),
    "llama-12x768": llama(32000, 768, 3072, 12, 12, 4),
    "gpt2": partial(save, "GPT2", {"bos_token_id": 1, "eos_token_id": 2}),
    "mixtral": experts("Mixtral", 32000, 512, 12, 8, 4, intermediate_size=1792, num_local_experts=8),
    "qwen3-moe": experts("Qwen3Moe", 32000, 512, 12, 8, 4, moe_intermediate_size=256, num_experts=64, head_dim=64),
    "llama-1b": llama(128256, 2048, 8192, 16, 32, 8, tied=True),
}


def vllm_environment(cores: list[str]) -> dict[str, str]:
    """Return the environment variables of vLLM's CPU build. `cores`: of each rank, e.g. `0-1`."""
    return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores), "HF_HUB_OFFLINE": "1"}


def main() -> int:
    bench = Benchmark(
        __doc__,
        overrides=True,
        vllm={"type": Path, "metavar": "PYTHON"},
        llama={"type": Path, "metavar": "PYTHON|build"},
        march={"choices": [level.name for level in levels()]},
        model={"choices": MODELS, "default": "llama-12x768"},
        files=["Q4_1", "Q8_0", "BF16"],
        dtype=["float32"],
        grids=list(GRIDS),
        rounds=3,
        requests=32,
        prompt=[128, 512],
        output=64,
        chunk=256,
    )
    given = bench.given
    if given.march:
        os.environ[VARIABLE] = given.march  # inherited by the engines' processes
        os.environ.update(required_level().limits)
    if given.llama == Path("build"):
        given.llama = build(required_level() if given.march else None)
    job: Row = {"chunk": given.chunk, "overrides": dict(word.split("=", 1) for word in given.overrides)}
    with scratch() as folder:
        (beside_llama if given.llama else beside_vllm)(bench, folder, job)
    return bench.end()


def required_level() -> Level:
    """Return the instruction-set level that limits the kernels."""
    found = level()
    assert found is not None
    return found


def beside_vllm(bench: Benchmark, folder: Path, job: Row) -> None:
    """Compare gapless with vLLM on a model with random weights."""
    given = bench.given
    MODELS[given.model](folder / "model")
    vocabulary = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    requests = make_requests(given, vocabulary)
    job |= {"model": str(folder / "model"), "rounds": write_rounds(folder, [requests])}
    pythons = {"gapless": sys.executable, **({"vllm": str(given.vllm)} if given.vllm else {})}
    floor = {
        (dtype, "one", "floor"): partial(run, "floor", sys.executable, job | {"dtype": dtype}) for dtype in given.dtype
    }
    cases = {
        (dtype, grid, engine): partial(run, engine, pythons[engine], job | {"dtype": dtype}, *GRIDS[grid])
        for dtype in given.dtype
        for grid in given.grids
        for engine in pythons
    }
    runs = by_turns(given.rounds, floor | cases)
    prompt_tokens, outputs = sum(len(each["prompt"]) for each in requests), given.requests * given.output
    floors = {}
    for dtype in given.dtype:
        rates = runs.pop((dtype, "one", "floor"))
        gflops = statistics.median(each["gflops"] for each in rates)
        flops = (prompt_tokens + outputs - given.requests) * rates[0]["flops_a_token"]
        flops += outputs * rates[0]["flops_a_sample"]
        floors[dtype] = flops / gflops / 1e9
        seconds = floors[dtype]
        bench.row("floor", dtype=dtype, seconds=seconds, gflops=gflops, tflop=flops / 1e12, prompt_tokens=prompt_tokens)
    middle = {key: statistics.median(each["seconds"][0] for each in found) for key, found in runs.items()}
    for (dtype, grid, engine), found in runs.items():
        seconds, theirs = middle[dtype, grid, engine], middle.get((dtype, grid, "vllm"))
        expected = next(each for key, each in runs.items() if key[0] == dtype)[0]["outputs"]
        bench.row(
            "runs",
            dtype=dtype,
            grid=grid,
            engine=engine,
            seconds=seconds,
            least_s=min(each["seconds"][0] for each in found),
            most_s=max(each["seconds"][0] for each in found),
            output_tokens_per_s=outputs / seconds,
            times_vllm=theirs / seconds if theirs else None,
            of_floor_share=floors[dtype] / seconds,
            start_s=statistics.median(each["start"] for each in found),
            peak_mb=max(each["mb"] for each in found),
            same_share=min(equal_share(each["outputs"], expected) for each in found),
        )


def beside_llama(bench: Benchmark, folder: Path, job: Row) -> None:
    """Compare gapless with llama.cpp on GGUF files."""
    from gguf import GGMLQuantizationType

    from .support.requantize import requantize

    given, source = bench.given, smollm2()
    paths = {name: source if name in source.name else folder / f"{name}.gguf" for name in given.files}
    paths |= {name: Path(name) for name in given.files if name.endswith(".gguf")}
    for name, path in paths.items():
        if path.parent == folder:
            requantize(source, GGMLQuantizationType[name], path)
    requests = make_requests(given, vocabulary=32000)  # in the vocabulary of both models of docs/performance.md
    alone = [[each] for each in requests[:ALONE]]
    rounds = [prefills(requests), requests, *(prefills(each) for each in alone), *alone]
    job |= {"rounds": write_rounds(folder, rounds), "threads": os.cpu_count()}
    cases = {}
    for name, path in paths.items():
        cases[name, "llama.cpp", "-"] = partial(run, "llama", str(given.llama), job | {"model": str(path)})
        for dtype in given.dtype:
            own = job | {"model": str(path), "dtype": dtype}
            cases[name, "gapless", dtype] = partial(run, "gapless", sys.executable, own)
    runs = by_turns(given.rounds, cases)
    expected = next(iter(runs.values()))[0]["outputs"]
    rates = {}
    for (name, engine, dtype), found in runs.items():
        rates[name, engine, dtype] = own_rates = medians([token_rates(rounds, each["seconds"]) for each in found])
        theirs = rates[name, "llama.cpp", "-"]
        common = {"file": name, "engine": engine, "dtype": dtype}
        bench.row(
            "tokens_per_s",
            **common,
            **own_rates,
            start_s=statistics.median(each["start"] for each in found),
            peak_mb=max(each["mb"] for each in found),
            same_share=equal_share(found[0]["outputs"], expected),
        )
        if engine != "llama.cpp":
            bench.row("times_llama", **common, **{key: rate / theirs[key] for key, rate in own_rates.items()})


def make_requests(given: Any, vocabulary: int) -> list[Row]:
    """Return requests with random token ids, according to the options."""
    lengths = np.random.default_rng(0).integers(given.prompt[0], given.prompt[1] + 1, given.requests)
    ids = np.random.default_rng(1)
    return [{"prompt": ids.integers(5, vocabulary, n).tolist(), "output": given.output} for n in lengths]


def prefills(requests: list[Row]) -> list[Row]:
    """Return the same requests with one output token each."""
    return [request | {"output": 1} for request in requests]


def write_rounds(folder: Path, rounds: list[list[Row]]) -> str:
    """Write rounds of requests to a file; rounds run one after another."""
    path = folder / "rounds.json"
    path.write_text(json.dumps([{"pause": 0.0, "requests": requests} for requests in rounds]))
    return str(path)


def token_rates(rounds: list[list[Row]], seconds: list[float]) -> dict[str, float]:
    """Return tokens/s from the rounds of `beside_llama`: all prompts, all requests, single prompts, single requests."""
    prompts = [sum(len(request["prompt"]) for request in requests) for requests in rounds]
    decodes = [sum(request["output"] - 1 for request in requests) for requests in rounds]
    lone, whole = slice(2, 2 + ALONE), slice(2 + ALONE, None)
    return {
        "prompts": prompts[0] / seconds[0],
        "decodes": decodes[1] / (seconds[1] - seconds[0]),
        "lone_prompt": sum(prompts[lone]) / sum(seconds[lone]),
        "lone_decodes": sum(decodes[whole]) / (sum(seconds[whole]) - sum(seconds[lone])),
    }


def equal_share(outputs: list[list[int]], expected: list[list[int]]) -> float:
    """Return the share of requests whose tokens are as expected."""
    return sum(map(list.__eq__, outputs, expected)) / len(expected)


def run(engine: str, python: str, job: Row, pp: int = 1, tp: int = 1) -> Row:
    """Run one engine in its own process, which prints `first` at its first token, then its results as JSON."""
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
    return found | {"start": start, "mb": most / 1e6}


if __name__ == "__main__":
    sys.exit(main())
