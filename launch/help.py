"""The texts of `gapless --help` and `gapless COMMAND --help`: every key with its default, type and meaning."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..conf.build import describe, dotted_keys, group_names, leaves, load_command, load_group
from ..conf.schema import EngineConfig

if TYPE_CHECKING:
    from .cli import Command

WIDTH = 118

MEANINGS = {
    "prompt": "one prompt, given here",
    "prompts": "a text file (a prompt a line), a .jsonl file (objects with prompt or prompt_token_ids, and any key of "
    "sampling), or `shipped`; without prompt and prompts: standard input, a prompt a line",
    "outputs": "where the JSONL goes; null: outputs.jsonl in the run folder",
    "print_texts": "print each text at the end",
    "seed": "of random weights, of sampling where sampling.seed is null, of a simulation's jitter and stragglers",
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
    "parallel.depth": "micro-batches in flight at once; null: pp, equal_time one more",
    "parallel.launcher": "who starts the ranks: local (in this process, one rank), ray or torchrun",
    "parallel.replicate_embedding": "the embedding whole on each rank of stage 0; null: where it takes little",
    "parallel.threads": "CPU threads a rank; null: cores of the node over its ranks",
    "parallel.host": "address that the sockets bind to",
    "parallel.ray_address": "null: start Ray on this machine; auto or an address: join that cluster",
    "parallel.start_timeout_s": "seconds until ranks that have not started are given up",
    "parallel.step_timeout_s": "seconds without progress that make a hung stage",
    "scheduler.name": "the policy; choose it by scheduler=NAME",
    "scheduler.batch": "B, most requests in a micro-batch; null: the slot bound over the depth, up to max_batch",
    "scheduler.max_batch": "bound of B where batch is null",
    "scheduler.order": "which waiting request is next: first come, shortest prompt, the user served least, or the "
    "nearest deadline",
    "scheduler.chunk": "sarathi: C, most prompt tokens of a micro-batch; equal_time: those of a typical one whose time "
    "it keeps to; auto: picked as the run goes",
    "scheduler.tile": "sarathi, equal_time: chunk + decodes is a multiple of it; null: hardware.tile",
    "scheduler.max_batched_tokens": "prefill_first: most prompt tokens of a batch; a longer prompt enters alone",
    "scheduler.budget": "token_budget: most tokens of a micro-batch, decodes included",
    "scheduler.iterations": "token_throttle: waiting prompt tokens are spread over so many micro-batches",
    "scheduler.max_prefill_tokens": "token_throttle: most prompt tokens of a micro-batch",
    "scheduler.min_prefill_tokens": "token_throttle: fewest prompt tokens of a micro-batch that prefills",
    "scheduler.kv_reserve": "token_throttle: share of free KV at which prefill stops",
    "scheduler.target_ms": "equal_time: time of a micro-batch on a stage; null: that of a typical one of chunk tokens",
    "scheduler.profile": "equal_time: a run folder whose fitted stage times it starts from; null: learned as it runs",
    "workload.name": "the workload; choose it by workload=NAME",
    "workload.num_prompts": "requests; null: all of the file, 100 where there is none (capacity, tune: 400 of any)",
    "workload.request_rate": "requests/s; inf: all at once; null: from the trace, or all at once",
    "workload.burstiness": "shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts, inf ticks",
    "workload.max_concurrency": "hold requests back while so many are unfinished; null: never",
    "workload.users": "deal requests round robin to so many users, for scheduler.order=fair_share",
    "workload.deadline_ms": "when the first token is due after the arrival, for scheduler.order=deadline; null: never",
    "workload.seed": "of lengths, arrivals and random prompts",
    "workload.input_len": "fixed: prompt tokens; null: by pd_ratio",
    "workload.output_len": "fixed: output tokens, null: by pd_ratio; sharegpt: of all, null: as the second turn",
    "workload.pd_ratio": "prompt tokens over output tokens; fixed: for the length that is null",
    "workload.range_ratio": "fixed: lengths vary evenly by this share either way",
    "workload.theta": "zipf: exponent of the law of P + D",
    "workload.min_len": "zipf: least P + D",
    "workload.max_len": "zipf: most P + D",
    "workload.path": "trace: a CSV (Azure, BurstGPT) or JSONL (Mooncake, Bailian), .gz or not; sharegpt: a JSON",
    "workload.time_scale": "trace: so many times as fast",
    "experiment": "which function of runtime/experiments runs; choose it by experiment=NAME",
    "policies": "several policies whole, as scheduler=NAME,NAME makes them; empty: scheduler alone",
    "repeats": "run each policy so often",
    "interleave": "repeats by turns (a b a b) rather than one after the other (a a b b)",
    "warmup": "a few short requests first, which do not count",
    "samples": "measurements of each micro-batch; more than a folder holds are added to it",
    "max_tokens": "largest micro-batch that is measured",
    "max_context": "longest context that is measured; null: the model's, at most twice max_tokens",
    "max_decodes": "most decodes of a micro-batch that is measured",
    "num_layers": "layers of the stage that is measured; null: those of the largest stage, at most 8",
    "neighbours": "other stages that compute at the same time; null: those that share a node",
    "pipeline": "time whole steps of the real pipeline too: sends, dispatch, stages to check by",
    "check": "measure nothing, tell the errors of this profile folder",
    "hardware.devices_per_node": "ranks that share a node and its fast links",
    "hardware.costs.multiprocessors": "of the device, among which kernels deal their tiles",
    "hardware.costs.gemm.tiles": "shapes of tiles that matrix products are computed in",
    "hardware.costs.gemm.tflops": "rate of the device at each tile, with every multiprocessor at work",
    "hardware.costs.gemm.whole_waves": "of each tile: 1 where a last wave of tiles costs a whole one, 0 only its share",
    "hardware.costs.gemm.fade": "how clocks fall as products grow: x times the work takes x**(1 + fade) times as long",
    "hardware.costs.gemm.sustained_tflops": "rate of large matrix products that power sustains",
    "hardware.costs.gemm.launch_us": "of a matrix product",
    "hardware.costs.gemm.wave_us": "of a wave of 256x128 tiles beside its products",
    "hardware.costs.gemm.split_us": "of adding up, where the inner dimension is split",
    "hardware.costs.gemm.split_share": "of the bytes of partial results that cost time",
    "hardware.costs.gemm.memory_gbps": "rate at which a matrix product reads weights",
    "hardware.costs.gemm.knee": "how sharply memory time goes over into compute time; 1 adds them",
    "hardware.costs.pointwise.launch_us": "of a kernel that computes row by row",
    "hardware.costs.pointwise.element_ns": "of an element of a row, on one multiprocessor",
    "hardware.costs.pointwise.norm_gbps": "of a norm, by bytes read and written",
    "hardware.costs.pointwise.rope_gbps": "of rotary embedding",
    "hardware.costs.pointwise.activation_gbps": "of the activation",
    "hardware.costs.pointwise.add_gbps": "of adding the residual",
    "hardware.costs.pointwise.copy_gbps": "of writes to the KV cache",
    "hardware.costs.pointwise.embedding_gbps": "of the embedding",
    "hardware.costs.attention.chunk_launch_us": "of a chunk's attention",
    "hardware.costs.attention.chunk_split_us": "of adding up, where the keys of a short chunk are split",
    "hardware.costs.attention.chunk_tflops": "rate over the prefix, with every multiprocessor at work",
    "hardware.costs.attention.chunk_self": "time of a key of the chunk itself, by that of one of its prefix",
    "hardware.costs.attention.chunk_waves": "as gemm.whole_waves",
    "hardware.costs.attention.chunk_spread": "over how many slots for blocks the work of one is spread, at most",
    "hardware.costs.attention.chunk_copy_gbps": "of the chunk's queries, keys, values and outputs",
    "hardware.costs.attention.decode_launch_us": "of the decodes' attention",
    "hardware.costs.attention.decode_split_us": "of adding up, where the keys of few decodes are split",
    "hardware.costs.attention.decode_wave_us": "of a wave of decodes beside their keys and values",
    "hardware.costs.attention.decode_gbps": "rate at which keys and values are read",
    "hardware.costs.attention.decode_waves": "as gemm.whole_waves",
    "hardware.costs.attention.decode_spread": "as chunk_spread, of a decode's KV head",
    "hardware.costs.attention.decode_token_ns": "of a token of its context, where one multiprocessor reads them",
    "hardware.costs.attention.decode_tokens": "tokens of it that one reads where keys are split, by wave of decodes",
    "hardware.costs.all_reduce.least_us": "least time of an all-reduce",
    "hardware.costs.all_reduce.ramp_us": "of an all-reduce: at 1 MB, growing with the root of the bytes",
    "hardware.costs.all_reduce.gbps": "rate of an all-reduce",
    "hardware.costs.all_reduce.knee": "how sharply least_us goes over into the time of the bytes; 1 adds them",
    "hardware.costs.node.least_us": "least time of a send within a node",
    "hardware.costs.node.ramp_us": "of a send within a node: at 1 MB, growing with the root of the bytes",
    "hardware.costs.node.gbps": "rate of a send within a node",
    "hardware.costs.node.knee": "how sharply least_us goes over into the time of the bytes; 1 adds them",
    "hardware.costs.network.least_us": "least time of a send between nodes",
    "hardware.costs.network.ramp_us": "of a send between nodes: at 1 MB, growing with the root of the bytes",
    "hardware.costs.network.gbps": "rate of a send between nodes",
    "hardware.costs.network.knee": "how sharply least_us goes over into the time of the bytes; 1 adds them",
    "hardware.costs.host.step_us": "what the host adds to a stage for a micro-batch; not with simulation.host=false",
    "hardware.costs.host.layer_us": "what it adds for a layer",
    "simulation.cost": "where stage times come from; auto: measured where profile is given, else analytic",
    "simulation.profile": "a folder that `gapless profile` wrote; null: the hardware's fitted constants",
    "simulation.devices": "hardware of each stage, where nodes differ; null: hardware everywhere",
    "simulation.replicas": "pipelines that serve side by side",
    "simulation.router": "which replica a request goes to: by turns, or to that with the fewest requests or tokens",
    "simulation.scatter_gather": "each tensor-parallel rank sends a slice to the next stage, and the receivers gather",
    "simulation.overlap_sends": "a stage computes on while it sends",
    "simulation.host": "count the host's overhead; false: as if the device always hid it",
    "simulation.dispatch_ms": "from the coordinator to the ranks",
    "simulation.result_ms": "from the last stage to the coordinator",
    "simulation.jitter": "coefficient of variation of stage times around the cost model's",
    "simulation.straggler_rate": "share of stage times that take straggler_factor times as long",
    "simulation.straggler_factor": "how much longer those take",
    "simulation.record": "keep all that the report shows; false: only summary.json, millions of requests in bounded "
    "memory",
    "slo.ttft_p99_ms": "most milliseconds of the p99 of TTFT over the requests; null: no bound",
    "slo.tbt_p99_ms": "most milliseconds of the p99 of TBT over all gaps between tokens; null: no bound",
    "seeds": "workloads that are tried: other draws, or other stretches of a trace",
    "precision": "a capacity is found to within this share",
    "nodes": "of the cluster, each with hardware.devices_per_node devices",
    "search.tp": "tensor-parallel sizes that are tried; null: all that divide a node's devices",
    "search.pp": "numbers of stages that are tried; null: all that divide the devices",
    "search.chunk": "chunks of sarathi and equal_time, budgets of token_budget, that are tried",
    "search.depth": "micro-batches in flight beyond pp that are tried beside the policy's own",
    "search.layers": "try layer splits beside the balanced one, where they make the slowest stage faster",
    "search.batch": "try a larger B where requests are shorter than the context",
    "search.finalists": "settings that get their capacity on all seeds",
    "search.exhaustive": "the capacity of every setting instead of a search: slow, to judge the search by",
    "slo.ttft_ms": "most milliseconds to the first token; requests that meet all bounds count for goodput",
    "slo.tpot_ms": "most milliseconds a token after the first, on average",
    "slo.tbt_ms": "most milliseconds between two tokens, at the worst",
    "slo.e2el_ms": "most milliseconds from arrival to the last token",
    "runs": "run folders, or folders that hold some (a sweep's, a benchmark's); the bare arguments",
    "out": "folder for the report; null: into the run folder, or a new one beside several",
    "figures": "write PNGs too",
    "sort": "the key of summary.json by which several runs are ranked",
    "cache.block_size": "tokens of a KV block",
    "cache.num_blocks": "KV blocks of a rank; null: all that fit beside the weights (the minimum over the ranks)",
}

GROUP_MEANINGS = {
    "model": "which model; also a path: model=FOLDER takes a Hugging Face folder",
    "hardware": "what a rank runs on",
    "parallel": "the rank grid and who starts it",
    "scheduler": "the policy that forms micro-batches; also a file with one of your own: scheduler=./FILE.py",
    "workload": "which requests come, and when",
    "experiment": "a figure or table of the paper, with all groups as it wants them; other keys hold over its own",
}


def overview(commands: Iterable[Command]) -> str:
    """What `gapless --help` prints."""
    commands = list(commands)
    listed = "\n".join(_entry(f"  {c.name}", c.summary, 12) for c in commands)
    examples = "\n".join(f"  {example}" for c in commands for example in c.examples)
    return f"""\
gapless serves large language models over pipeline and tensor parallelism without gaps in the pipeline (SARATHI).

usage: gapless COMMAND [-m] [GROUP=CHOICE ...] [KEY=VALUE ...]
       gapless report FOLDER ... [KEY=VALUE ...]

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
    defaults = dict(leaves(own))
    for group, choice in chosen.items():
        if choice is not None:
            defaults |= {f"{group}.{key}": value for key, value in leaves(load_group(group, choice))}
    usage = "FOLDER ... [KEY=VALUE ...]" if command.positional else "[-m] [GROUP=CHOICE ...] [KEY=VALUE ...]"
    lines = [f"gapless {command.name}: {command.summary}", "", f"usage: gapless {command.name} {usage}", ""]
    if chosen:
        lines.append("groups (GROUP=CHOICE):")
    for group, choice in chosen.items():
        lines += [
            _entry(f"  {group}={_value(choice)}", GROUP_MEANINGS[group], 28),
            *textwrap.wrap("choices: " + ", ".join(group_names(group)), WIDTH, initial_indent=" " * 28,
                           subsequent_indent=" " * 28, break_on_hyphens=False),
        ]
    if "policies" in defaults:
        how = "by turns on one started pipeline" if command.has_ranks else "one after the other"
        lines += _wrapped(f"scheduler=NAME,NAME without -m runs each policy {how}, over the same requests; a key of "
                          "scheduler then applies to those that have it.", "  ")
    lines += ["", "keys (KEY=VALUE), with the defaults of the groups above:"] if chosen else ["keys (KEY=VALUE):"]
    section = ""
    for key, hint in _ordered(command):
        parent = key.rpartition(".")[0]
        if parent != section:
            section = parent
            lines.append("")
        default = f"={_value(defaults[key])}" if key in defaults else ""
        lines.append(_entry(f"  {key}{default}", f"{MEANINGS[key]} ({describe(hint)})", 44))
    if not command.positional:
        lines += [
            "",
            "Texts and paths need no quotes of their own within the shell's: prompt=\"Hello, world (=x)\".",
            f"The run folder is {command.folder}; hydra.run.dir=FOLDER names another. HYDRA_FULL_ERROR=1 shows "
            "tracebacks.",
        ]
    lines += [
        "",
        "examples:",
        *(f"  {example}" for example in command.examples),
    ]
    return "\n".join(lines)


def _ordered(command: Command) -> list[tuple[str, Any]]:
    """Keys of the command itself first, then section by section."""
    by_itself = command.config.INSTEAD if issubclass(command.config, EngineConfig) else {}
    keys = [(key, hint) for key, hint in dotted_keys(command.config) if key not in by_itself]
    order = ["", "search", "sampling", "workload", "slo", "simulation", "hardware", "parallel", "scheduler", "cache",
             "model"]  # fmt: skip
    return sorted(keys, key=lambda item: order.index(item[0].partition(".")[0] if "." in item[0] else ""))


def _value(value: Any) -> str:
    """A value as one writes it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return str(value.get("name", value))
    return f"[{','.join(map(_value, value))}]" if isinstance(value, list) else str(value)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _entry(head: str, text: str, column: int) -> str:
    """`head`, and `text` from `column` on, on a line of its own where the head is longer."""
    wrapped = textwrap.wrap(text, WIDTH - column, break_on_hyphens=False)
    if len(head) >= column:
        return "\n".join([head, *(" " * column + line for line in wrapped)])
    return "\n".join([head.ljust(column) + wrapped[0], *(" " * column + line for line in wrapped[1:])])
