"""Trains the small demo model that ships with gapless: `python -m benchmarks.train_shipped`.

Needs only torch, transformers, tokenizers and safetensors. The corpus is the Python standard library of the interpreter
that runs it (Python Software Foundation License): module sources without tests and data tables, their docstrings as
documentation pages, and the language reference that `help()` shows (`support/corpus.py`). A byte-level BPE tokenizer
and a `LlamaForCausalLM` are trained on the CPU and written as a Hugging Face folder. The same number of steps
reproduces the model up to rounding errors; 1,139 steps take about an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from .support.corpus import load_corpus

EOT = "<|endoftext|>"
VOCABULARY = 2048
SHORT, LONG = 512, 2048  # sequence lengths
THETA, LONG_THETA = 10_000.0, 44_000.0  # RoPE base of each
LONG_FROM = 0.87  # share of the steps after which sequences are long
BATCH_TOKENS = 4096
ADAMW_LR, MUON_LR = 3e-3, 0.015  # peaks
WARMUP_STEPS, DECAY_FROM = 40, 0.45
SEED = 1234
PRINT_EVERY_S = 15.0


def train_tokenizer(docs: list[str]) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's pre-tokenization) on the documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(docs, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, docs: list[str]) -> np.ndarray:
    """Encode documents into one stream; a separator precedes each document and ends the stream."""
    separator = tokenizer.token_to_id(EOT)
    stream = [token for encoded in tokenizer.encode_batch(docs) for token in (separator, *encoded.ids)]
    return np.array([*stream, separator], dtype=np.int64)


class Windows:
    """Cuts a token stream into windows, in an order that seed and index determine.

    Each epoch shifts the cuts by a random offset and shuffles the windows.
    """

    def __init__(self, stream: np.ndarray, length: int) -> None:
        self._stream, self.length = stream, length
        self._per_epoch = (len(stream) - 1) // length - 1
        self._epoch = -1
        self._taken = 0

    def _window(self, index: int) -> np.ndarray:
        epoch, place = divmod(index, self._per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([SEED, self.length, epoch])
            self._offset = int(rng.integers(self.length))
            self._order = rng.permutation(self._per_epoch)
            self._epoch = epoch
        start = self._offset + int(self._order[place]) * self.length
        return self._stream[start : start + self.length + 1]

    def next_batch(self) -> torch.Tensor:
        """Return the next windows of `BATCH_TOKENS` tokens together."""
        first, count = self._taken, max(1, BATCH_TOKENS // self.length)
        self._taken += count
        return torch.from_numpy(np.stack([self._window(first + place) for place in range(count)]))


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized by Newton-Schulz iterations, for matrices."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @staticmethod
    def orthogonalize(gradient: torch.Tensor, steps: int = 5) -> torch.Tensor:
        x = gradient / (gradient.norm() + 1e-7)
        is_tall = x.size(0) > x.size(1)
        x = x.T if is_tall else x
        for _ in range(steps):
            a = x @ x.T
            b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
            x = torch.addmm(x, b, x, beta=3.4445)
        return x.T if is_tall else x

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["buffer"] = torch.zeros_like(parameter)
                buffer = state["buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = self.orthogonalize(parameter.grad.lerp(buffer, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rows, columns = parameter.shape
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices of the layers, AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers." in name]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": [model.get_input_embeddings().weight], "lr": ADAMW_LR, "weight_decay": 0.1},
        {"params": norms, "lr": ADAMW_LR, "weight_decay": 0.0},
    ]
    optimizers = [torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-9), Muon(matrices, lr=MUON_LR)]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak"] = group["lr"]
    return optimizers


def lr_scale(step: int, steps: int) -> float:
    """Return the learning rate over its peak: linear warm-up, plateau, linear decay to almost 0."""
    progress = step / steps
    decay = 1.0 if progress < DECAY_FROM else max(0.02, (1 - progress) / (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARMUP_STEPS, decay)


def token_losses(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each next token, in the shape of the targets."""
    logits = model(batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").view(batch.size(0), -1)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, stream: np.ndarray, length: int, windows: int | None = None) -> torch.Tensor:
    """Return the mean loss at each position, over all windows of the stream or over `windows` evenly spread ones."""
    model.eval()
    total = (len(stream) - 1) // length
    count = min(windows or total, total)
    starts = [int(place * total / count) * length for place in range(count)]
    losses = [token_losses(model, torch.from_numpy(stream[start : start + length + 1])[None]) for start in starts]
    model.train()
    return torch.cat(losses).mean(0)


def set_theta(model: LlamaForCausalLM, theta: float) -> None:
    """Change the RoPE base."""
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the Hugging Face folder, with weights in bfloat16."""
    half = LlamaForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["rope_theta"] = model.config.rope_parameters["rope_theta"]  # where older readers look for it
    config["dtype"] = "float32"  # compute type: outputs are then the same on every processor
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOT,
        "eos_token": EOT,
        "model_max_length": model.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.train_shipped", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("shipped-model"), help="model folder")
    parser.add_argument("--steps", type=int, default=1139)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(given.threads)
    torch.set_flush_denormal(True)
    train_docs, valid_docs = load_corpus()
    tokenizer = train_tokenizer(train_docs)
    train, valid = encode(tokenizer, train_docs), encode(tokenizer, valid_docs)
    print(f"Python {sys.version.split()[0]}: {len(train):,} tokens to train on, {len(valid):,} to validate", flush=True)
    separator = tokenizer.token_to_id(EOT)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=LONG,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=separator,
        eos_token_id=separator,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).float()
    optimizers = make_optimizers(model)
    windows, printed = Windows(train, SHORT), time.monotonic()
    for step in range(given.steps):
        if windows.length == SHORT and step / given.steps >= LONG_FROM:
            windows = Windows(train, LONG)
            set_theta(model, LONG_THETA)
        scale = lr_scale(step, given.steps)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * scale
        loss = token_losses(model, windows.next_batch()).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if time.monotonic() - printed > PRINT_EVERY_S:
            printed = time.monotonic()
            print(f"step {step + 1:5d} of {given.steps}  loss {loss.item():.4f}  rate x{scale:.3f}", flush=True)
    export(model, tokenizer, given.out)
    long = evaluate(model, valid, LONG)
    losses = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_loss_short": evaluate(model, train, SHORT, 150).mean().item(),
        "valid_loss_short": evaluate(model, valid, SHORT).mean().item(),
        "valid_loss_long": long.mean().item(),
        "valid_loss_at_300_500": long[300:500].mean().item(),
        "valid_loss_at_1500_2047": long[1500:].mean().item(),
    }
    print(json.dumps(losses, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
