"""Measures what rounded weights change on the real SmolLM2-135M: `python -m benchmarks.quantization`.

Each variant's next-token distributions over a fixed text are compared with those of bfloat16: the mean KL divergence in
nats, how often the most probable token is the same, and the text's perplexity. The weights come from the package's GGUF
file, whose codes of 4 bits `int4` would find again. So `int8` and `int4` round the same model with its channels in
another order, which computes the same: no group of theirs is one of the file's. `float32` is what bfloat16 itself
changes. A minute on 2 cores.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from gapless.conf.architecture import Architecture
from gapless.conf.schema import ModelConfig
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.build_stage import build_stage
from gapless.models.gguf.config import config_values
from gapless.models.gguf.file import open_gguf
from gapless.models.gguf.smollm2 import smollm2
from gapless.models.huggingface import resolve_architecture
from gapless.models.layout import names_of, tensor_shapes
from gapless.models.open_checkpoint import open_checkpoint
from gapless.models.tokenizer import load_tokenizer
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous

from .support.harness import Benchmark
from .support.results import ROOT

BLOCK_SIZE = 16


def main() -> int:
    bench = Benchmark(__doc__, tokens=1024, threads=2)
    torch.set_num_threads(bench.given.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = write_reordered(Path(name))
        variants = {
            "float32": ModelConfig(weights=str(folder), dtype="float32"),
            "Q4_1 file": ModelConfig(weights="smollm2", dtype="bfloat16"),
            "int8": ModelConfig(weights=str(folder), dtype="bfloat16", quantization="int8"),
            "int4": ModelConfig(weights=str(folder), dtype="bfloat16", quantization="int4"),
        }
        tokens = text_tokens()[: bench.given.tokens]
        exact = log_probs(ModelConfig(weights=str(folder), dtype="bfloat16"), tokens)
        bench.row("weights", weights="bfloat16", tokens=len(tokens), perplexity=perplexity(exact, tokens))
        for variant, model in variants.items():
            found = log_probs(model, tokens)
            divergence = (exact.exp() * (exact - found)).sum(-1).mean().item()
            agreement = (exact.argmax(-1) == found.argmax(-1)).float().mean().item()
            bench.row(
                "weights",
                weights=variant,
                kl_nats=divergence,
                top_token_share=agreement,
                perplexity=perplexity(found, tokens),
            )
    return bench.end(True)


def text_tokens() -> list[int]:
    """Return the tokens of questions, of code, and of a licence."""
    files = (ROOT / "conf/questions_prompts.jsonl", ROOT / "conf/shipped_prompts.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    prompts = [row.get("prompt") or row["messages"][-1]["content"] for row in rows]
    text = "\n".join((*prompts, (ROOT / "LICENSE").read_text()))
    return load_tokenizer(smollm2(), 49152).encode(text)


def perplexity(log_probs_TV: torch.Tensor, tokens: list[int]) -> float:
    of_next = log_probs_TV[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    return float((-of_next.mean()).exp())


def log_probs(model: ModelConfig, tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the token after each, [T, V]."""
    arch = resolve_architecture(model)
    blocks = -(-len(tokens) // BLOCK_SIZE)
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        layers = range(arch.num_layers)
        stage = build_stage(model, arch, groups, layers, num_blocks=blocks, block_size=BLOCK_SIZE)
        stage.pack()
        chunk = Segment(0, len(tokens), list(range(blocks)))
        batch = RaggedBatch.of(tokens, [chunk], [], list(range(len(tokens))))
        return stage(stage.prepare(batch)).log_softmax(-1)


def write_reordered(folder: Path) -> Path:
    """Write the file's model in bfloat16 to a folder, with its channels in a random order."""
    file = smollm2()
    arch = resolve_architecture(ModelConfig(weights=str(file)))
    source, names = open_checkpoint(file, arch), names_of(arch)
    generator = torch.Generator().manual_seed(0)
    hidden, inner = (torch.randperm(n, generator=generator) for n in (arch.hidden_size, arch.ffn_size))
    tensors = {}
    for name, shape in tensor_shapes(arch).items():
        columns = slice(0, shape[1]) if len(shape) == 2 else None
        tensor = source.read(name, slice(0, shape[0]), columns)
        part = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if part in ("up_proj", "gate_proj"):
            tensor = tensor[inner]
        elif part in ("o_proj", "v_proj"):
            of_values, of_outputs = head_orders(arch)
            tensor = tensor[of_values] if part == "v_proj" else tensor[:, of_outputs]
        if part == "down_proj":
            tensor = tensor[:, inner]
        tensor = tensor[hidden] if part in ("down_proj", "o_proj") else tensor[..., hidden]
        tensors[name] = tensor.bfloat16().contiguous()
    assert names.head not in tensors, "tied"
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_values(open_gguf(file)) | {"model_type": "llama"}))
    return folder


def head_orders(arch: Architecture) -> tuple[torch.Tensor, torch.Tensor]:
    """Return orders of the elements of each head, of the rows of values and of the columns of the output."""
    D, K = arch.head_dim, arch.num_kv_heads
    within = torch.stack([torch.randperm(D, generator=torch.Generator().manual_seed(k)) for k in range(K)])
    of_heads = within.repeat_interleave(arch.num_heads // K, dim=0)
    return tuple((each + D * torch.arange(len(each))[:, None]).flatten() for each in (within, of_heads))


if __name__ == "__main__":
    sys.exit(main())
