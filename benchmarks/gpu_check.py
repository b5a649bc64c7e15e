"""Checks on one GPU what CPUs cannot: `python -m benchmarks.gpu_check [--out RESULT.json]`.

Compares attention backends with float32 on the CPU, greedy tokens with transformers, and bfloat16 logits with float32;
measures speed. Needs torch, numpy, transformers and megatron-core, and xformers for its rows; no network, no
checkpoint. Exits 1 if a check fails; without CUDA it says so and exits 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gapless.conf.build import build, load_group
from gapless.conf.schema import ModelConfig
from gapless.models.attention.sdpa import SdpaBackend
from gapless.models.attention.select import make_backend
from gapless.models.attention.xformers import why_not
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.build_stage import build_stage
from gapless.models.huggingface import resolve_architecture
from gapless.models.kernels.kernels import TorchKernels
from gapless.models.stage import Stage
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: `status` is ok, FAIL, skip, or empty for a measurement."""

    name: str
    status: str
    value: str


def verdict(name: str, error: float, tolerance: float) -> Row:
    return Row(name, "ok" if error <= tolerance else "FAIL", f"error {error:.2g} (at most {tolerance:g})")


def guarded(name: str, check: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Turn an exception of a check into a failed row, so that the other checks go on."""
    try:
        yield from check()
    except Exception as error:  # whatever an operator or a missing package raises belongs in the table
        yield Row(name, "FAIL", f"{type(error).__name__}: {error}".splitlines()[0][:160])


MIXED = RaggedBatch.of(
    [0] * 107,
    [Segment(33, 70, range(0, 7)), Segment(0, 33, [40, 9, 13])],
    [Segment(60, 1, [30, 31, 32, 33]), Segment(0, 1, [39]), Segment(16, 1, [20, 19]), Segment(17, 1, [25, 26])],
    [],
)
IN_A_ROW = RaggedBatch.of(
    [0] * 72,
    [Segment(33, 70, range(20, 27))],
    [Segment(60, 1, range(4, 8)), Segment(31, 1, range(30, 32))],
    [],
)


def attention(device: torch.device) -> Iterator[Row]:
    """Compare each backend with SDPA in float32 on the CPU: scattered and consecutive blocks, groups, windows."""
    cases = itertools.product(
        [("sdpa", torch.float32, 1e-4), ("sdpa", torch.bfloat16, 0.03), ("xformers", torch.bfloat16, 0.03)],
        [("scattered", MIXED), ("in a row", IN_A_ROW)],
        [(1, 64, None), (4, 128, None), (4, 64, 24)],
    )
    for (backend, dtype, tolerance), (blocks, batch), (G, D, window) in cases:
        name = f"{backend} {str(dtype)[6:]}, {blocks}, {G} heads a group of {D}, window {window}"
        if backend == "xformers" and (reason := why_not(dtype, device, D)) is not None:
            yield Row(name, "skip", reason[:120])
            continue
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(batch.num_tokens, 2, G, D, generator=generator)
        keys, values = (torch.randn(48 * 16, 2, D, generator=generator) for _ in range(2))
        exact = SdpaBackend(block_size=16, window=window, dtype=torch.float32, device=CPU)
        expected = exact.attend(q, keys, values, exact.plan(batch))
        tested = make_backend(
            backend, TorchKernels(), block_size=16, num_blocks=48, window=window, dtype=dtype, device=device, head_dim=D
        )
        q, keys, values = (x.to(device, dtype) for x in (q, keys, values))
        found = tested.attend(q, keys, values, tested.plan(batch))
        yield verdict(name, (found.float().cpu() - expected).abs().max().item(), tolerance)


def paged_split_k(device: torch.device) -> Iterator[Row]:
    """Compare xformers' paged operator, which reads scattered decodes, with SDPA: pages of 64, grouped heads."""
    from xformers.ops import fmha
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalCausalWithOffsetPaddedKeysMask

    K, G, D, page = 2, 4, 128, 64
    tables, lengths = [[5, 2, 7], [1, 4, 0]], [130, 77]
    q = torch.randn(len(lengths), K, G, D, device=device, dtype=torch.bfloat16)
    keys, values = (torch.randn(8 * page, K, D, device=device, dtype=torch.bfloat16) for _ in range(2))
    bias = PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [1] * len(lengths), lengths, block_tables=torch.tensor(tables, dtype=torch.int32, device=device), page_size=page
    )
    k, v = (x[None, :, :, None].expand(-1, -1, -1, G, -1) for x in (keys, values))
    found = fmha.memory_efficient_attention_forward(q[None], k, v, attn_bias=bias, op=fmha.triton_splitk.FwOp)
    batch = RaggedBatch.of(
        [0] * len(lengths), [], [Segment(n - 1, 1, t) for n, t in zip(lengths, tables, strict=True)], []
    )
    exact = SdpaBackend(block_size=page, window=None, dtype=torch.float32, device=CPU)
    q, keys, values = (x.float().cpu() for x in (q, keys, values))
    expected = exact.attend(q, keys, values, exact.plan(batch))
    error = (found.reshape(expected.shape).float().cpu() - expected).abs().max().item()
    yield verdict("xformers paged triton_splitk decode", error, 0.03)


def start(device: torch.device) -> Groups:
    name = "cuda:0" if device.type == "cuda" else "cpu"
    return Groups.start(Rendezvous(0, 1, "", name), Mesh(1, 1), 120)


def stage_of(model: ModelConfig, groups: Groups, num_blocks: int) -> Stage:
    arch = resolve_architecture(model)
    return build_stage(model, arch, groups, range(arch.num_layers), num_blocks=num_blocks, block_size=16)


def greedy(stage: Stage, prompt: list[int], chunk: int, new: int) -> list[int]:
    """Prefill one request in chunks, then decode; returns the `new` greedy tokens."""
    text, blocks = list(prompt), range(-(-(len(prompt) + new) // 16))
    done = 0
    while len(text) < len(prompt) + new:
        size = min(chunk, len(prompt) - done) if done < len(prompt) else 1
        ids, segment = text[done : done + size], Segment(done, size, blocks)
        done += size
        is_chunk, rows = done <= len(prompt), [size - 1] if done >= len(prompt) else []
        batch = RaggedBatch.of(ids, [segment] if is_chunk else [], [] if is_chunk else [segment], rows)
        out = stage(stage.prepare(batch))
        if rows:
            text.append(int(out[0].argmax()))
    return text[len(prompt) :]


def tokens(device: torch.device) -> Iterator[Row]:
    """Compare greedy tokens of each model family in float32 with transformers on the CPU."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }  # fmt: skip
    families: list[transformers.PretrainedConfig] = [
        transformers.GPT2Config(
            vocab_size=512, n_embd=256, n_layer=4, n_head=4, n_positions=512, initializer_range=0.1
        ),
        transformers.LlamaConfig(**common),
        transformers.MistralConfig(**common, sliding_window=40),
        transformers.Qwen2Config(**common),
        transformers.Qwen3Config(**common, head_dim=64),
    ]
    prompt = torch.randint(512, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    for config in families:
        torch.manual_seed(2)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        text = list(prompt)
        with torch.inference_mode():
            for _ in range(24):
                text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        with tempfile.TemporaryDirectory() as folder, start(device) as groups:
            model.save_pretrained(folder)
            stage = stage_of(ModelConfig(weights=folder, dtype="float32"), groups, 16)
            devices = {p.device.type for p in stage.parameters()}
            found = greedy(stage, prompt, 64, 24)
        same = found == text[len(prompt) :] and devices == {device.type}
        yield Row(f"{config.model_type} float32 tokens", "ok" if same else "FAIL", f"24 tokens on {devices}")


def logits(device: torch.device) -> Iterator[Row]:
    """Compare the 160M model's logits on the device with float32 on the CPU; errors are relative to their deviation."""
    model = dataclasses.replace(build(ModelConfig, load_group("model", "llama-160m"), "model"), max_model_len=512)
    ids = torch.randint(32000, (200,), generator=torch.Generator().manual_seed(3)).tolist()

    def last_rows(where: torch.device, dtype: Any, backend: Any) -> torch.Tensor:
        with start(where) as groups:
            stage = stage_of(dataclasses.replace(model, dtype=dtype, attention=backend), groups, 16)
            stage(stage.prepare(RaggedBatch.of(ids[:120], [Segment(0, 120, range(13))], [], [])))
            rest = RaggedBatch.of(ids[120:], [Segment(120, 80, range(13))], [], list(range(80)))
            return stage(stage.prepare(rest)).cpu()

    exact = last_rows(CPU, "float32", "sdpa")
    for dtype, backend, tolerance in (
        ("float32", "sdpa", 1e-3), ("bfloat16", "sdpa", 0.1), ("bfloat16", "xformers", 0.1),
    ):  # fmt: skip
        name = f"llama-160m {dtype} logits, {backend}"
        if backend == "xformers" and (reason := why_not(torch.bfloat16, device, 64)) is not None:
            yield Row(name, "skip", reason[:120])
            continue
        difference = last_rows(device, dtype, backend) - exact
        yield verdict(name, (difference.std() / exact.std()).item(), tolerance)


def speed(device: torch.device, name: str) -> Iterator[Row]:
    """Measure tokens/s of one rank: chunks of a long prompt, decodes at a context of 1K, both in one micro-batch."""
    model = dataclasses.replace(build(ModelConfig, load_group("model", name), "model"), max_model_len=2048)
    shapes = {
        "prefill, chunks of 512": (512, 0),
        "decode, 1 request": (0, 1),
        "decode, 64 requests": (0, 64),
        "chunk of 256 with 16 decodes": (256, 16),
    }
    with start(device) as groups:
        began = time.perf_counter()
        stage = stage_of(model, groups, 65 * 128)
        yield Row(f"{name} built", "", f"{time.perf_counter() - began:.0f} s, {type(stage.attention).__name__}")
        for what, (chunk, decodes) in shapes.items():
            batch = RaggedBatch.of(
                [7] * (chunk + decodes),
                [Segment(512, chunk, range(64 * 128, 65 * 128))] if chunk else [],
                [Segment(1000 + i, 1, range(i * 128, (i + 1) * 128)) for i in range(decodes)],
                list(range(chunk, chunk + decodes)) or [chunk - 1],
            )
            seconds = time_of(lambda batch=batch: stage(stage.prepare(batch)), device)  # type: ignore[misc]
            rate = batch.num_tokens / seconds
            yield Row(f"{name} {what}", "", f"{rate:,.0f} tokens/s ({seconds * 1e3:.2f} ms a micro-batch)")


def time_of(run: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of a run, after 5 runs to warm up, over at least 20 runs and one second (at most 495 runs)."""
    times: list[float] = []
    for i in range(500):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= 5:
            times.append(time.perf_counter() - began)
        if len(times) >= 20 and sum(times) > 1.0:
            break
    return sorted(times)[len(times) // 2]


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: no CUDA device here; nothing to check")
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda", 0)
    packages = {name: version(name) for name in ("torch", "megatron-core", "xformers", "transformers")}
    versions = {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda), **packages}
    print(", ".join(f"{key} {value}" for key, value in versions.items()))
    checks: list[tuple[str, Callable[[], Iterator[Row]]]] = [
        ("attention", lambda: attention(device)),
        ("tokens", lambda: tokens(device)),
        ("logits", lambda: logits(device)),
        ("llama-160m", lambda: speed(device, "llama-160m")),
        ("llama-7b", lambda: speed(device, "llama-7b")),
    ]
    if packages["xformers"] != "absent":
        checks.append(("xformers paged", lambda: paged_split_k(device)))
    rows: list[Row] = []
    for name, check in checks:
        for row in guarded(name, check):
            print(f"{row.name:62} {row.status:5} {row.value}", flush=True)
            rows.append(row)
    if arguments.out is not None:
        result = {"versions": versions, "rows": [dataclasses.asdict(row) for row in rows]}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    failed = sum(row.status == "FAIL" for row in rows)
    print(f"{failed} failed" if failed else "all that ran is right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
