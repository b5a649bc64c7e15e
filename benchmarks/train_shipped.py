"""Train the small demo language model that ships with gapless.

Needs nothing but torch, transformers, tokenizers and safetensors.
Finds its corpus by itself: the Python standard library of the interpreter
that runs it (Python Software Foundation License).  From it come

* the source code of every module that is not a test or a data table,
* the docstrings of those modules, set out as plain documentation text, and
* the language reference pages that ``help()`` shows (``pydoc_data.topics``).

Then trains a byte-level BPE tokenizer and a ``LlamaForCausalLM`` on the
CPU and writes a Hugging Face folder that ``AutoModelForCausalLM`` can load.

    python -m benchmarks.train_shipped --out my-model --work my-run --minutes 60
    python -m benchmarks.train_shipped --out my-model --work my-run --steps 3000

With ``--minutes`` the learning rate follows the clock, so that the run ends on
time whatever else the machine is doing; with ``--steps`` it follows the step
count and the run repeats (to rounding).  Interrupt it whenever you like: the folder
given by ``--out`` always holds the best model so far, and the same command
resumes from ``--work``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from .support.corpus import load_corpus

EOT = "<|endoftext|>"


def train_tokenizer(docs: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's pre-tokenization) on the documents."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(docs, trainer)
    return tok


def encode(tok: Tokenizer, docs: list[str]) -> np.ndarray:
    """Encode documents into one stream; each is preceded by the separator."""
    eot = tok.token_to_id(EOT)
    stream: list[int] = []
    for enc in tok.encode_batch(docs):
        stream.append(eot)
        stream.extend(enc.ids)
    stream.append(eot)
    return np.array(stream, dtype=np.int64)


class Windows:
    """Cut a token stream into windows, in an order fixed by seed and index.

    Every epoch shifts the cuts by a random offset and shuffles the windows.
    """

    def __init__(self, stream: np.ndarray, length: int, seed: int) -> None:
        self.stream, self.length, self.seed = stream, length, seed
        self.per_epoch = (len(stream) - 1) // length - 1
        self.epoch = -1

    def __getitem__(self, index: int) -> np.ndarray:
        epoch, i = divmod(index, self.per_epoch)
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, self.length, epoch])
            self.offset = int(rng.integers(self.length))
            self.order = rng.permutation(self.per_epoch)
            self.epoch = epoch
        start = self.offset + int(self.order[i]) * self.length
        return self.stream[start : start + self.length + 1]

    def batch(self, first: int, count: int) -> torch.Tensor:
        return torch.from_numpy(np.stack([self[first + i] for i in range(count)]))


# ------------------------------------------------------------------ optimizer


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized by Newton-Schulz (for matrices)."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @staticmethod
    def orthogonalize(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
        x = g / (g.norm() + 1e-7)
        tall = x.size(0) > x.size(1)
        x = x.T if tall else x
        for _ in range(steps):
            a = x @ x.T
            b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
            x = torch.addmm(x, b, x, beta=3.4445)
        return x.T if tall else x

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["buf"] = torch.zeros_like(p)
                buf = state["buf"].lerp_(p.grad, 1 - group["momentum"])
                update = self.orthogonalize(p.grad.lerp(buf, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.size(0) / p.size(1)) ** 0.5)


def make_optimizers(model: LlamaForCausalLM, args) -> list[torch.optim.Optimizer]:
    """Give the matrices of the layers to Muon (or AdamW), the rest to AdamW."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." in n]
    norms = [p for p in model.parameters() if p.ndim < 2]
    embed = [model.get_input_embeddings().weight]
    groups = [
        {"params": embed, "lr": args.lr, "weight_decay": 0.1},
        {"params": norms, "lr": args.lr, "weight_decay": 0.0},
    ]
    if args.optimizer == "adamw":
        groups.append({"params": matrices, "lr": args.lr, "weight_decay": 0.1})
    opts: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-9)]
    if args.optimizer == "muon":
        opts.append(Muon(matrices, lr=args.muon_lr))
    for opt in opts:
        for group in opt.param_groups:
            group["peak"] = group["lr"]
    return opts


def lr_scale(progress: float, step: int, warmup: int, hold: float) -> float:
    """Follow a trapezoid: linear warm-up, a plateau up to ``hold``, a line to (almost) 0."""
    up = min(1.0, (step + 1) / warmup)
    down = 1.0 if progress < hold else max(0.02, (1 - progress) / (1 - hold))
    return min(up, down)


# ------------------------------------------------------- evaluation and saving


def token_losses(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each next token, shaped like the targets."""
    logits = model(batch[:, :-1], use_cache=False).logits
    flat = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return flat.view(batch.size(0), -1)


@torch.no_grad()
def evaluate(model, stream: np.ndarray, length: int, windows: int | None = None) -> torch.Tensor:
    """Return the mean loss at each position, over evenly spread windows of the stream."""
    model.eval()
    total = (len(stream) - 1) // length
    windows = min(windows or total, total)
    picks = [int(i * total / windows) for i in range(windows)]
    rows = []
    for i in picks:
        row = torch.from_numpy(stream[i * length : (i + 1) * length + 1])
        rows.append(token_losses(model, row[None]))
    model.train()
    return torch.cat(rows).mean(0)


def set_theta(model: LlamaForCausalLM, theta: float) -> None:
    """Change the base of the rotary position embedding."""
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)


def write_atomically(path: Path, write) -> None:
    temp = path.with_name(path.name + ".tmp")
    write(temp)
    os.replace(temp, path)


def export(model: LlamaForCausalLM, tok: Tokenizer, out: Path) -> None:
    """Write the Hugging Face folder in bfloat16, replacing each file at once."""
    out.mkdir(parents=True, exist_ok=True)
    half = LlamaForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory(dir=out) as temp:
        half.save_pretrained(temp)
        config_path = Path(temp) / "config.json"
        config = json.loads(config_path.read_text())
        # The older layout kept it at the top level; serve readers of both.
        config["rope_theta"] = model.config.rope_parameters["rope_theta"]
        config["dtype"] = "float32"  # to compute in: outputs do not depend on what the processor multiplies
        config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        tok.save(str(Path(temp) / "tokenizer.json"))
        (Path(temp) / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "bos_token": EOT,
                    "eos_token": EOT,
                    "model_max_length": model.config.max_position_embeddings,
                    "clean_up_tokenization_spaces": False,
                },
                indent=2,
            )
            + "\n"
        )
        for file in sorted(Path(temp).iterdir()):
            file.chmod(0o644)
            os.replace(file, out / file.name)


@torch.no_grad()
def sample(model, tok, prompt: str, count: int, temperature: float, seed: int = 0) -> str:
    """Continue a prompt (plain recomputation of the context: short texts only)."""
    model.eval()
    gen = torch.Generator().manual_seed(seed)
    ids = tok.encode(prompt).ids
    for _ in range(count):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        if temperature > 0:
            probs = torch.softmax(logits / temperature, -1)
            nxt = int(torch.multinomial(probs, 1, generator=gen))
        else:
            nxt = int(logits.argmax())
        if nxt == model.config.eos_token_id:
            break
        ids.append(nxt)
    model.train()
    return tok.decode(ids)


# ---------------------------------------------------------------------- main


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", type=Path, default=Path("shipped-model"), help="model folder")
    p.add_argument("--work", type=Path, default=Path("shipped-run"), help="state, for resuming")
    length = p.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=60.0, help="schedule by the clock")
    length.add_argument("--steps", type=int, help="schedule by the step count instead")
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--inner", type=int, default=384, help="width of the feed-forward part")
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--kv-heads", type=int, default=4)
    p.add_argument("--vocab", type=int, default=2048)
    p.add_argument("--context", type=int, default=2048, help="length of the long sequences")
    p.add_argument("--seq", type=int, default=512, help="length of the short sequences")
    p.add_argument("--batch-tokens", type=int, default=4096, help="tokens in a step")
    p.add_argument("--long-from", type=float, default=0.87, help="when the long ones begin")
    p.add_argument("--theta", type=float, default=10000.0, help="RoPE base, short sequences")
    p.add_argument("--long-theta", type=float, default=44000.0, help="RoPE base, long ones")
    p.add_argument(
        "--theta-at",
        choices=["long", "end"],
        default="long",
        help="raise the RoPE base before the long sequences, or only in the finished model",
    )
    p.add_argument("--optimizer", choices=["muon", "adamw"], default="muon")
    p.add_argument("--lr", type=float, default=3e-3, help="AdamW's peak learning rate")
    p.add_argument("--muon-lr", type=float, default=0.015)
    p.add_argument("--warmup", type=int, default=40)
    p.add_argument("--hold", type=float, default=0.45, help="when the rate begins to fall")
    p.add_argument("--seed", type=int, default=1234)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--save-minutes", type=float, default=4.0)
    p.add_argument("--no-export", action="store_true", help="for measurements")
    p.add_argument("--compile", action="store_true", help="use torch.compile")
    return p.parse_args()


def main() -> None:
    args = parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    transformers_logging.disable_progress_bar()
    args.work.mkdir(parents=True, exist_ok=True)

    train_docs, valid_docs = load_corpus()
    tok_file = args.work / f"tokenizer-{args.vocab}.json"
    if tok_file.exists():
        tok = Tokenizer.from_file(str(tok_file))
    else:
        tok = train_tokenizer(train_docs, args.vocab)
        write_atomically(tok_file, lambda temp: tok.save(str(temp)))
    assert tok.get_vocab_size() == args.vocab, tok.get_vocab_size()
    train_ids, valid_ids = encode(tok, train_docs), encode(tok, valid_docs)
    size = sum(len(d.encode()) for d in train_docs)
    print(
        f"python {sys.version.split()[0]}  documents {len(train_docs)}+{len(valid_docs)}  "
        f"train {size / 1e6:.2f} MB = {len(train_ids)} tokens "
        f"({size / len(train_ids):.2f} bytes/token)  valid {len(valid_ids)} tokens",
        flush=True,
    )

    eot = tok.token_to_id(EOT)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.hidden // args.heads,
        max_position_embeddings=args.context,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": args.theta},
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=eot,
        eos_token_id=eot,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).float()
    params = sum(p.numel() for p in model.parameters())
    opts = make_optimizers(model, args)
    print(f"parameters {params}", flush=True)

    run = {"step": 0, "tokens": 0, "elapsed": 0.0, "short": 0, "long": 0, "best": math.inf}
    run |= {"stage": "short", "theta": args.theta}
    state_file = args.work / "state.pt"
    if state_file.exists():
        saved = torch.load(state_file, weights_only=True)
        model.load_state_dict(saved["model"])
        for opt, s in zip(opts, saved["opts"], strict=True):
            opt.load_state_dict(s)
        run |= saved["run"]
        set_theta(model, run["theta"])
        print(f"resumed at step {run['step']}", flush=True)
    forward = torch.compile(model) if args.compile else model

    streams = {
        "short": Windows(train_ids, args.seq, args.seed),
        "long": Windows(train_ids, args.context, args.seed),
    }

    def enter(stage: str, theta: float) -> None:
        """Begin a stage; its losses do not compare with those before it."""
        run.update(stage=stage, theta=theta, best=math.inf)
        set_theta(model, theta)

    def save(train_loss: float) -> None:
        length = streams[run["stage"]].length
        val = evaluate(model, valid_ids, length, 40960 // length).mean().item()
        note = ""
        if val < run["best"] and not args.no_export:
            run["best"] = val
            export(model, tok, args.out)
            note = "  (exported)"
        state = {
            "model": model.state_dict(),
            "opts": [opt.state_dict() for opt in opts],
            "run": run,
        }
        write_atomically(state_file, lambda temp: torch.save(state, temp))
        row = {**run, "train_loss": round(train_loss, 4), "valid_loss": round(val, 4)}
        with open(args.work / "log.jsonl", "a") as log:
            log.write(json.dumps(row) + "\n")
        print(f"-- step {run['step']}  validation loss {val:.4f}{note}", flush=True)

    # On a machine that others use, two threads can be slower than one: each
    # parallel region waits for the thread that was pushed aside.  Keep a running
    # step time for each choice, take the faster, and try the other now and then.
    choices = {args.threads} if args.steps else {1, args.threads}
    step_time = dict.fromkeys(sorted(choices, reverse=True), 0.0)

    recent: list[float] = []
    started = time.monotonic() - run["elapsed"]
    last_print, last_save, print_tokens = time.monotonic(), run["elapsed"], run["tokens"]
    while True:
        run["elapsed"] = time.monotonic() - started
        clock = run["elapsed"] / (60 * args.minutes)
        progress = run["step"] / args.steps if args.steps else clock
        if progress >= 1:
            break
        kind = "long" if progress >= args.long_from else "short"
        if kind != run["stage"]:
            enter(kind, args.long_theta if args.theta_at == "long" else args.theta)
        rows = max(1, args.batch_tokens // streams[kind].length)
        batch = streams[kind].batch(run[kind], rows)
        scale = lr_scale(progress, run["step"], args.warmup, args.hold)
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = group["peak"] * scale

        threads = min(step_time, key=step_time.get)
        if run["step"] % 10 == 9:
            threads = max(step_time, key=step_time.get)
        torch.set_num_threads(threads)
        step_started = time.monotonic()

        loss = token_losses(forward, batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)

        run["step"] += 1
        run[kind] += rows
        run["tokens"] += rows * streams[kind].length
        recent = [*recent[-49:], loss.item()]
        now = time.monotonic()
        took = now - step_started
        step_time[threads] = 0.5 * (step_time[threads] or took) + 0.5 * took
        if now - last_print > 15:
            speed = (run["tokens"] - print_tokens) / (now - last_print)
            last_print, print_tokens = now, run["tokens"]
            print(
                f"step {run['step']:5d}  {100 * progress:5.1f} %  {kind:5s}  "
                f"loss {sum(recent) / len(recent):.4f}  rate x{scale:.3f}  "
                f"{speed:7.0f} tokens/s  {threads} threads  {run['tokens'] / 1e6:.2f} M tokens",
                flush=True,
            )
        if now - started - last_save > 60 * args.save_minutes:
            save(sum(recent) / len(recent))
            last_save = time.monotonic() - started
    if run["theta"] != args.long_theta:
        enter("long", args.long_theta)
    save(sum(recent) / max(1, len(recent)))

    train = evaluate(model, train_ids, args.seq, 150).mean().item()
    full = evaluate(model, valid_ids, args.seq).mean().item()
    long = evaluate(model, valid_ids, args.context)
    summary = {
        "parameters": params,
        "steps": run["step"],
        "tokens": run["tokens"],
        "minutes": round(run["elapsed"] / 60, 1),
        "train_loss_short": round(train, 4),
        "valid_loss_short": round(full, 4),
        "valid_loss_long": round(long.mean().item(), 4),
        "valid_loss_at_300_500": round(long[300:500].mean().item(), 4),
        "valid_loss_at_1500_2047": round(long[1500:].mean().item(), 4),
    }
    print(json.dumps(summary, indent=2))
    for prompt in ['def read(self, size=-1):\n    """', "Return a list of"]:
        for temperature in (0.0, 0.7):
            print(f"===== temperature {temperature}")
            print(sample(model, tok, prompt, 120, temperature), flush=True)


if __name__ == "__main__":
    main()
