"""The texts of `gapless --help` and `gapless COMMAND --help`: every key with its default, type and meaning."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..conf.build import GROUPS, describe, dotted_keys, group_names, load_command, load_group

if TYPE_CHECKING:
    from .cli import Command

WIDTH = 118

MEANINGS = {
    "prompt": "one prompt, given here",
    "prompts": "a text file (a prompt a line), a .jsonl file (objects with prompt or prompt_token_ids, and any key of "
    "sampling), or `shipped`; without prompt and prompts: standard input, a prompt a line",
    "outputs": "where the JSONL goes; null: outputs.jsonl in the run folder",
    "print_texts": "print each text at the end",
    "seed": "of random weights, and of sampling where sampling.seed is null",
    "sampling.n": "outputs a prompt",
    "sampling.max_tokens": "most tokens an output may have",
    "sampling.min_tokens": "no stop before so many tokens",
    "sampling.temperature": "0 is greedy: exactly the most likely token",
    "sampling.top_p": "sample from the fewest tokens whose probability reaches this",
    "sampling.top_k": "sample from the k most likely tokens; 0: all",
    "sampling.min_p": "drop tokens less likely than this times the most likely one",
    "sampling.seed": "same seed, same output, whatever the batch, policy, tp or pp; null: from seed and the request",
    "sampling.repetition_penalty": "above 1 disfavours tokens of the prompt and the output",
    "sampling.presence_penalty": "above 0 disfavours tokens of the output, once",
    "sampling.frequency_penalty": "above 0 disfavours tokens of the output, each time again",
    "sampling.stop": "strings that end an output",
    "sampling.stop_token_ids": "token ids that end an output",
    "sampling.include_stop_str_in_output": "keep the stop string in the text",
    "sampling.ignore_eos": "go on past the end-of-sequence token",
    "sampling.logprobs": "log-probabilities of so many best tokens (0: of the sampled one only); null: none",
    "model.name": "a label for reports",
    "model.weights": "random, shipped (the small model in the package) or a Hugging Face folder",
    "model.tokenizer": "a folder or tokenizer.json; null: the one beside the weights, else UTF-8 bytes",
    "model.dtype": "auto: float32 on CPU, bfloat16 on CUDA",
    "model.attention": "auto: xformers on CUDA where it runs, else sdpa",
    "model.max_model_len": "longest prompt plus output; null: the model's own",
    "model.architecture.vocab_size": "V, tokens of the vocabulary",
    "model.architecture.hidden_size": "H, width of the residual stream",
    "model.architecture.num_layers": "decoder layers",
    "model.architecture.num_heads": "N, query heads",
    "model.architecture.num_kv_heads": "K, key and value heads; a divisor of num_heads",
    "model.architecture.head_dim": "D, size of a head",
    "model.architecture.ffn_size": "H2, inner width of the feed-forward block",
    "model.architecture.max_position": "L, longest sequence that the model supports",
    "model.architecture.norm": "RMSNorm or LayerNorm",
    "model.architecture.norm_eps": "added to the variance",
    "model.architecture.position": "rotary or learned positions",
    "model.architecture.rope_theta": "base of the rotary frequencies",
    "model.architecture.rope_scaling.type": "how rotary frequencies stretch",
    "model.architecture.rope_scaling.factor": "by how much",
    "model.architecture.rope_scaling.low_freq_factor": "llama3: slower than this is divided by factor",
    "model.architecture.rope_scaling.high_freq_factor": "llama3: faster than this stays",
    "model.architecture.rope_scaling.original_max_position": "llama3: the length trained on before",
    "model.architecture.activation": "of the feed-forward block",
    "model.architecture.gated_ffn": "a gate beside the up projection (SwiGLU)",
    "model.architecture.qkv_bias": "bias on the query, key and value projections (Qwen2, GPT-2)",
    "model.architecture.attention_out_bias": "bias on attention's output projection",
    "model.architecture.ffn_bias": "bias on the feed-forward projections",
    "model.architecture.qk_norm": "RMSNorm over each head's query and key (Qwen3)",
    "model.architecture.sliding_window": "a token sees itself and the window - 1 before it (Mistral); null: all",
    "model.architecture.tie_embeddings": "the head shares the embedding's weights",
    "model.architecture.bos_token_id": "put before a text prompt where the tokenizer does so",
    "model.architecture.eos_token_ids": "end of sequence",
    "hardware.name": "a label for reports",
    "hardware.device": "of every rank",
    "hardware.memory_gib": "M_G, what a rank may use for weights and KV cache",
    "hardware.tile": "rows that a matmul is padded to; 128 on an A100 or A6000",
    "parallel.pp": "pipeline stages",
    "parallel.tp": "tensor-parallel ranks a stage",
    "parallel.layers": "layers of each stage ([5,7]); null: balanced, embedding and head weighed in",
    "parallel.depth": "micro-batches in flight at once; null: pp",
    "parallel.launcher": "who starts the ranks: local (in this process, one rank), ray or torchrun",
    "parallel.threads": "CPU threads a rank; null: cores of the node over its ranks",
    "parallel.host": "address that the sockets bind to",
    "parallel.ray_address": "null: start Ray on this machine; auto or an address: join that cluster",
    "parallel.start_timeout_s": "seconds until ranks that have not started are given up",
    "parallel.step_timeout_s": "seconds without progress that make a hung stage",
    "scheduler.name": "the policy; choose it by scheduler=NAME",
    "scheduler.batch": "B, most requests in a micro-batch; null: the slot bound over the depth, up to max_batch",
    "scheduler.max_batch": "bound of B where batch is null",
    "scheduler.chunk": "sarathi: C, most prompt tokens of a micro-batch",
    "scheduler.tile": "sarathi: chunk + decodes is a multiple of it; null: hardware.tile",
    "cache.block_size": "tokens of a KV block",
    "cache.num_blocks": "KV blocks of a rank; null: all that fit beside the weights (the minimum over the ranks)",
}

GROUP_MEANINGS = {
    "model": "which model; also a path: model=FOLDER takes a Hugging Face folder",
    "hardware": "what a rank runs on",
    "parallel": "the rank grid and who starts it",
    "scheduler": "the policy that forms micro-batches",
}


def overview(commands: Iterable[Command]) -> str:
    """What `gapless --help` prints."""
    commands = list(commands)
    listed = "\n".join(_entry(f"  {c.name}", c.summary, 12) for c in commands)
    examples = "\n".join(f"  {example}" for c in commands for example in c.examples)
    return f"""\
gapless serves large language models over pipeline and tensor parallelism without gaps in the pipeline (SARATHI).

usage: gapless COMMAND [-m] [GROUP=CHOICE ...] [KEY=VALUE ...]

commands:
{listed}

options:
{_entry("  COMMAND --help", "every key with its default, type and meaning; the groups with their choices", 20)}
{_entry("  -m, --multirun", "a sweep: a value with commas is several runs", 20)}
{_entry("  --version", "the version", 20)}

examples:
{examples}"""


def command(command: Command) -> str:
    """What `gapless COMMAND --help` prints."""
    own, chosen = load_command(command.name)
    defaults = dict(_leaves(own))
    for group, choice in chosen.items():
        defaults |= {f"{group}.{key}": value for key, value in _leaves(load_group(group, choice))}
    lines = [
        f"gapless {command.name}: {command.summary}",
        "",
        f"usage: gapless {command.name} [-m] [GROUP=CHOICE ...] [KEY=VALUE ...]",
        "",
        "groups (GROUP=CHOICE):",
    ]
    for group in GROUPS:
        lines += [
            _entry(f"  {group}={chosen[group]}", GROUP_MEANINGS[group], 28),
            *textwrap.wrap("choices: " + ", ".join(group_names(group)), WIDTH, initial_indent=" " * 28,
                           subsequent_indent=" " * 28, break_on_hyphens=False),
        ]
    lines += ["", "keys (KEY=VALUE), with the defaults of the groups above:"]
    section = ""
    for key, hint in _ordered(command):
        parent = key.rpartition(".")[0]
        if parent != section:
            section = parent
            lines.append("")
        default = f"={_value(defaults[key])}" if key in defaults else ""
        lines.append(_entry(f"  {key}{default}", f"{MEANINGS[key]} ({describe(hint)})", 44))
    lines += [
        "",
        "Texts and paths need no quotes of their own within the shell's: prompt=\"Hello, world (=x)\".",
        "The run folder is runs/DATE_TIME; hydra.run.dir=FOLDER names another. HYDRA_FULL_ERROR=1 shows tracebacks.",
        "",
        "examples:",
        *(f"  {example}" for example in command.examples),
    ]
    return "\n".join(lines)


def _ordered(command: Command) -> list[tuple[str, Any]]:
    """Keys of the command itself first, then section by section."""
    keys = list(dotted_keys(command.config))
    order = ["", "sampling", *GROUPS[1:], "cache", "model"]
    return sorted(keys, key=lambda item: order.index(item[0].partition(".")[0] if "." in item[0] else ""))


def _leaves(mapping: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value(value: Any) -> str:
    """A value as one writes it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _entry(head: str, text: str, column: int) -> str:
    """`head`, and `text` from `column` on, on a line of its own where the head is longer."""
    wrapped = textwrap.wrap(text, WIDTH - column, break_on_hyphens=False)
    if len(head) >= column:
        return "\n".join([head, *(" " * column + line for line in wrapped)])
    return "\n".join([head.ljust(column) + wrapped[0], *(" " * column + line for line in wrapped[1:])])
