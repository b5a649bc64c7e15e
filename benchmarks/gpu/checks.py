"""Checks that results are right: attention, greedy tokens of each model family, and logits."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import tempfile
from collections.abc import Iterator
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

from .model import start, with_graphs
from .parts import Task
from .rows import Row, checked

CPU = torch.device("cpu")
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


def attention(task: Task) -> Iterator[Row]:
    """Compare each backend with SDPA in float32 on the CPU: scattered and consecutive blocks, groups, windows."""
    device = torch.device(task.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    cases = itertools.product(
        [("sdpa", torch.float32, 1e-4), ("sdpa", torch.bfloat16, 0.03), ("xformers", torch.bfloat16, 0.03)],
        [("scattered", MIXED), ("in a row", IN_A_ROW)],
        [(1, 64, None), (4, 128, None), (4, 64, 24)],
    )
    for (backend, dtype, tolerance), (blocks, batch), (G, D, window) in cases:
        name, setting = f"{backend} {str(dtype)[6:]}", f"{blocks}, {G} heads a group of {D}, window {window}"
        if backend == "xformers" and (reason := why_not(dtype, device, D)) is not None:
            yield Row(part="attention", quantity=name, setting=setting, status="skip", note=reason[:120])
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
        yield checked("attention", name, setting, _largest_difference(found, expected), tolerance)
    yield _paged_split_k(device)


def _paged_split_k(device: torch.device) -> Row:
    """Compare xformers' paged decode operator with SDPA: pages of 64, grouped heads."""
    name, setting = "xformers paged triton_splitk", "decodes, pages of 64"
    reason = why_not(torch.bfloat16, device, 128)
    if reason is not None or importlib.util.find_spec("triton") is None:
        note = (reason or "triton is not installed")[:120]
        return Row(part="attention", quantity=name, setting=setting, status="skip", note=note)
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
    return checked("attention", name, setting, _largest_difference(found.reshape(expected.shape), expected), 0.03)


def tokens(task: Task) -> Iterator[Row]:
    """Compare greedy tokens of each model family in float32 with transformers on the CPU."""
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = False
    common: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    families: list[transformers.PretrainedConfig] = [
        transformers.GPT2Config(
            vocab_size=512,
            n_embd=256,
            n_layer=4,
            n_head=4,
            n_positions=512,
            initializer_range=0.1,
            bos_token_id=0,
            eos_token_id=0,
        ),
        transformers.LlamaConfig(**common),
        transformers.MistralConfig(**common, sliding_window=40),
        transformers.Qwen2Config(**common),
        transformers.Qwen3Config(**common, head_dim=64),
    ]
    new = 4 if task.small else 24
    prompt = torch.randint(512, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    for config in families[:2] if task.small else families:
        torch.manual_seed(2)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        text = list(prompt)
        with torch.inference_mode():
            for _ in range(new):
                text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        with tempfile.TemporaryDirectory() as folder, start(task.device) as groups:
            model.save_pretrained(folder)
            stage = _stage_of(ModelConfig(weights=folder, dtype="float32"), groups)
            devices = {p.device.type for p in stage.parameters()}
            found = _greedy(stage, prompt, 64, new)
        wrong = sum(a != b for a, b in zip(found, text[len(prompt) :], strict=True))
        setting = f"{config.model_type}, float32, of {new}"
        yield checked("tokens", "tokens that differ from transformers", setting, wrong, 0)
        if devices != {task.device}:
            yield Row(part="tokens", quantity="device", setting=setting, status="FAIL", note=f"weights on {devices}")


def logits(task: Task) -> Iterator[Row]:
    """Compare a model's logits on the device with float32 on the CPU; errors are relative to their deviation."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device, name = torch.device(task.device), "tiny" if task.small else "llama-160m"
    model = build(ModelConfig, load_group("model", name), "model")
    arch = resolve_architecture(model)
    head_dim, vocabulary = arch.head_dim, arch.vocab_size
    ids = torch.randint(vocabulary, (200,), generator=torch.Generator().manual_seed(3)).tolist()

    def last_rows(where: str, dtype: Any, backend: Any, graphs: bool = False) -> torch.Tensor:
        with start(where) as groups:
            stage = _stage_of(dataclasses.replace(model, dtype=dtype, attention=backend), groups)
            forward = with_graphs(stage).forward if graphs else stage
            forward(stage.prepare(RaggedBatch.of(ids[:120], [Segment(0, 120, range(13))], [], [])))
            rest = RaggedBatch.of(ids[120:], [Segment(120, 80, range(13))], [], list(range(80)))
            return forward(stage.prepare(rest)).cpu()

    exact = last_rows("cpu", "float32", "sdpa")
    for dtype, backend, tolerance in (
        ("float32", "sdpa", 1e-3),
        ("bfloat16", "sdpa", 0.1),
        ("bfloat16", "xformers", 0.1),
    ):
        quantity, setting = f"{name} {dtype}, error of the logits", backend
        if backend == "xformers" and (reason := why_not(torch.bfloat16, device, head_dim)) is not None:
            yield Row(part="logits", quantity=quantity, setting=setting, status="skip", note=reason[:120])
            continue
        for graphs in (False, True):
            difference = last_rows(task.device, dtype, backend, graphs) - exact
            setting = f"{backend}, CUDA graphs" if graphs else backend
            yield checked("logits", quantity, setting, (difference.std() / exact.std()).item(), tolerance)


def _stage_of(model: ModelConfig, groups: Groups) -> Stage:
    arch = resolve_architecture(model)
    return build_stage(model, arch, groups, range(arch.num_layers), num_blocks=16, block_size=16)


def _greedy(stage: Stage, prompt: list[int], chunk: int, new: int) -> list[int]:
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


def _largest_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found.float().cpu() - expected).abs().max().item()
