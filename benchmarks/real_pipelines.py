"""Reports the errors of simulations of real servers: `python -m benchmarks.real_pipelines FOLDER --write FILE`.

FOLDER contains `h200/h200_pp.csv` (vLLM on eight H200s: median time between tokens, output tokens/s) and
`h200/silicon.csv` (ai-dynamo/aiconfigurator, Apache-2.0: single-stage servers, time to first token and per output
token). Each server is simulated with `engine=vllm` under its clients' load, a closed loop. Four constants of the host
were fitted to the servers of Qwen3 0.6B in `h200_pp.csv` (`--fit`). The H100's time per row, the rate of large FP8
GEMMs and the front's time per prompt token were fitted to every second server of `silicon.csv`. All others are held
out. FILE is `docs/accuracy.md`. Two minutes on one core.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from gapless.conf.errors import ConfigError
from gapless.parallel.placement import StageLink
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.pipeline.setting import make_setting

from .support.harness import Benchmark, say
from .support.simulated import configure, replicas_of

MODELS = {  # by name in the files
    "qwen3-0.6b": (
        "model=qwen3-8b model.architecture.hidden_size=1024 model.architecture.num_layers=28 "
        "model.architecture.num_heads=16 model.architecture.ffn_size=3072 model.architecture.tie_embeddings=true"
    ),
    "qwen3-8b": "model=qwen3-8b",
    "qwen3-14b": (
        "model=qwen3-8b model.architecture.hidden_size=5120 model.architecture.num_layers=40 "
        "model.architecture.num_heads=40 model.architecture.ffn_size=17408"
    ),
    "qwen3-32b": (
        "model=qwen3-8b model.architecture.hidden_size=5120 model.architecture.num_layers=64 "
        "model.architecture.num_heads=64 model.architecture.ffn_size=25600"
    ),
    "llama-3.1-8b": "model=llama3-8b",
    "llama-3.1-70b": "model=llama2-70b model.architecture.vocab_size=128256",
}
FITTED = "qwen3-0.6b"
LONG = "model.architecture.max_position=131072"


@dataclass(frozen=True)
class Campaign:
    """A set of servers with the same kind of client and the same flags.

    `keys` are the overrides for them, with {inputs}, {outputs} and {clients} of a server. Each client sends `requests`
    requests, of which the first `warmup` do not count. `cached`: prompts were in the prefix cache.
    """

    name: str
    keys: str
    requests: int = 10
    warmup: int = 0
    cached: bool = False


# GuideLLM, natoscott/benchmarks (aiconfigurator-eval): vLLM 0.18.
PIPELINES = Campaign("8 x H200", "workload.input_len={inputs} workload.output_len={outputs}", requests=3, warmup=1)
# aiconfigurator's own, vLLM 0.12. Its generator sets max_num_batched_tokens to the prompt + 1500 + max_num_seqs (512).
OWN = Campaign(
    "Qwen3 32B, H100",
    "workload.input_len={inputs} workload.output_len={outputs} scheduler.max_batched_tokens={budget}",
)
# SemiAnalysis InferenceX: lengths from 0.8 to 1 of the nominal ones, ten requests per client, no prefix cache.
INFERENCEX = Campaign(
    "Llama 3.1 70B FP8, H100 and H200",
    "workload.input_len={shorter_inputs} workload.output_len={shorter_outputs} workload.range_ratio=0.111 "
    "cache.prefix_caching=false scheduler.max_batch={clients} " + LONG,
)
# Some first tokens are faster than the GPUs' peak allows: clients repeat 100 prompts (AIPerf's default of
# --num-dataset-entries).
REPEATED = Campaign(
    "others in FP8",
    "workload.input_len={inputs} workload.output_len={outputs} workload.distinct_prompts=100 " + LONG,
    cached=True,
)
CAMPAIGNS = (OWN, INFERENCEX, REPEATED)


@dataclass(frozen=True, eq=False)
class Server:
    """A measured server: its setting, and its clients' measurements in seconds or tokens/s."""

    model: str
    quantization: str | None
    gpu: str
    tp: int
    pp: int
    inputs: int
    outputs: int
    clients: int
    seen: dict[str, float]
    campaign: Campaign
    fitted: bool

    @property
    def keys(self) -> str:
        """The overrides of its simulation."""
        clients = self.campaign.keys.format(
            inputs=self.inputs,
            outputs=self.outputs,
            clients=self.clients,
            budget=self.inputs + 2012,
            shorter_inputs=round(0.9 * self.inputs),
            shorter_outputs=round(0.9 * self.outputs),
        )
        return (
            f"{MODELS[self.model]} model.quantization={self.quantization or 'null'} hardware={self.gpu} engine=vllm "
            f"parallel.tp={self.tp} parallel.pp={self.pp} workload=fixed workload.max_concurrency={self.clients} "
            f"workload.num_prompts={self.campaign.requests * self.clients} {clients}"
        )

    @cached_property
    def counts_first_tokens(self) -> bool:
        """Whether TTFT is comparable: all requests fit into the KV cache and no prompt was cached."""
        fits = self.clients * (self.inputs + self.outputs) <= make_setting(configure(self.keys)).plan.kv_tokens
        return fits and not self.campaign.cached


def pipelines(folder: Path) -> list[Server]:
    """Read the eight-GPU servers."""
    return [
        Server(
            *(line["model"], "fp8" if line["dtype"] == "fp8" else None, "h200", int(line["tp"]), int(line["pp"])),
            *(4000, 1000, int(line["concurrency"])),
            {"itl": float(line["itl_p50_ms"]) / 1e3, "output_rate": float(line["output_tok_s"])},
            *(PIPELINES, line["model"] == FITTED),
        )
        for line in _lines(folder / "h200" / "h200_pp.csv")
    ]


def servers(folder: Path) -> list[Server]:
    """Read vLLM's single-stage servers; every second one was fitted."""
    found: list[Server] = []
    for line in _lines(folder / "h200" / "silicon.csv"):
        name = line["model"].rpartition("/")[2].lower().removesuffix("-fp8").removesuffix("-instruct")
        if line["backend"] == "vllm" and name in MODELS:
            sizes = (int(line[key]) for key in ("isl", "osl", "concurrency"))
            seen = {"ttft": float(line["ttft_ms"]) / 1e3, "tpot": float(line["tpot_ms"]) / 1e3}
            fp8 = "fp8" if line["dtype"] == "fp8" else None
            campaign = INFERENCEX if name == "llama-3.1-70b" else REPEATED if fp8 else OWN
            grid, fitted = (int(line["tp"]), int(line["pp"])), len(found) % 2 == 0
            found.append(Server(name, fp8, line["gpu"], *grid, *sizes, seen, campaign, fitted))
    return found


def _lines(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def simulated(server: Server) -> dict[str, float] | None:
    """Simulate a server; return its clients' measurements, or None if its model does not fit.

    The median time between tokens is over all pairs of tokens, including those that a prefill interrupts.
    """
    try:
        (replica,) = replicas_of(configure(server.keys))
    except ConfigError as error:
        say(f"{server.model} on {server.gpu}, tp {server.tp}: {error}")
        return None
    requests = [(each.arrival, np.asarray(each.token_times)) for each in replica.record.requests]
    counted = requests[server.campaign.warmup * server.clients :]
    begin, end = (sorted(times[-1] for _, times in requests)[at] for at in (server.clients - 1, -1))
    return {
        "itl": float(np.median(np.concatenate([np.diff(times) for _, times in counted]))),
        "output_rate": sum(len(times) for _, times in counted) / (end - begin),
        "ttft": float(np.mean([times[0] - arrival for arrival, times in counted])),
        "tpot": float(np.mean([(times[-1] - times[0]) / max(1, len(times) - 1) for _, times in counted])),
    }


Found = list[tuple[Server, dict[str, float]]]


def run(all_servers: Iterable[Server]) -> Found:
    """Simulate servers; return each with its errors, simulated / measured - 1."""
    found = []
    for server in all_servers:
        if (predicted := simulated(server)) is not None:
            found.append((server, {name: predicted[name] / value - 1 for name, value in server.seen.items()}))
    return found


def fit(cells: Sequence[Server]) -> tuple[float, ...]:
    """Fit the host's constants, in microseconds, to the median times between tokens."""
    of_cells = []
    for cell in cells:
        costs = make_setting(configure(cell.keys, "simulation.host=false")).costs
        decodes = MicroBatchShape((), cell.clients, 4500 * cell.clients, cell.clients)
        send = costs.operators[0].send(cell.clients, link=StageLink(between_nodes=False), scatter_gather=True)
        sends = (cell.pp - 1) * 1e6 * send
        of_cells.append((np.array(costs.seconds(decodes)) * 1e6, np.array(costs.layers), sends, cell.clients))
    seen = np.array([1e6 * cell.seen["itl"] for cell in cells])

    def loss(constants: tuple[float, ...]) -> float:
        floor, layer, several, row = constants
        times = [
            np.maximum(device + several * layers * (clients > 1), floor + layer * layers).sum() + sends + row * clients
            for device, layers, sends, clients in of_cells
        ]
        off = np.abs(np.array(times) / seen - 1)
        return float(off.mean() + 0.3 * np.percentile(off, 90))

    return min(itertools.product(range(300, 600, 50), range(20, 70, 5), range(0, 10), range(0, 16)), key=loss)


def best_grids(cells: Found) -> tuple[int, int, list[str]]:
    """Return how often the grid with the most tokens/s is predicted correctly, the number of loads, and the misses."""
    loads: dict[tuple[str, int], Found] = defaultdict(list)
    for each in cells:
        loads[each[0].model, each[0].clients].append(each)
    right, wrong = 0, []
    for (model, clients), found in loads.items():
        real = max(found, key=lambda each: each[0].seen["output_rate"])[0]
        ours = max(found, key=lambda each: each[0].seen["output_rate"] * (1 + each[1]["output_rate"]))[0]
        right += real is ours
        if real is not ours:
            wrong.append(f"{model} at {clients}: tp{ours.tp} pp{ours.pp}, not tp{real.tp} pp{real.pp}")
    return right, len(loads), wrong


def percent(errors: Sequence[float]) -> str:
    """Format the median and 90th percentile of absolute errors, and the central 80% range of signed errors."""
    low, high = np.percentile(errors, (10, 90))
    off = np.abs(errors)
    return f"{np.median(off):.1%} | {np.percentile(off, 90):.1%} | {low:+.0%} to {high:+.0%}"


def page(cells: Found, others: Found) -> str:
    """Return the page: summaries, then the signed errors of every server."""
    rows = []
    kinds: list[tuple[str, str, Found]] = []
    for what in ("itl", "output_rate"):
        for fitted in (True, False):
            name = f"8 x H200, {'Qwen3 0.6B (fitted: the host)' if fitted else 'held out'}"
            kinds.append((name, what, [each for each in cells if each[0].fitted == fitted]))
    for what in ("tpot", "ttft"):
        for campaign in (*CAMPAIGNS, None):
            for fitted in (True, False):
                chosen = [e for e in others if e[0].campaign == (campaign or e[0].campaign) and e[0].fitted == fitted]
                chosen = [each for each in chosen if what == "tpot" or each[0].counts_first_tokens]
                name = f"one stage, {campaign.name if campaign else 'all'}{'' if fitted else ', held out'}"
                kinds.append((name, what, chosen))
    for name, what, found in kinds:
        if found:
            rows.append(f"| {name} | {_NAMES[what]} | {len(found)} | {percent([e[what] for _, e in found])} |")
    right, loads, wrong = best_grids(cells)
    order = f"The grid with most tokens/s is the real one for {right} of {loads} models and loads." if loads else ""
    for each in wrong:
        order += f"\n- {each}"
    tables = []
    by_grid: dict[tuple[str, int, int], dict[int, dict[str, float]]] = defaultdict(dict)
    for server, error in cells:
        by_grid[server.model, server.tp, server.pp][server.clients] = error
    clients = sorted({server.clients for server, _ in cells})
    for what in ("itl", "output_rate"):
        head = f"| {_NAMES[what]} | " + " | ".join(f"{number}" for number in clients) + " |"
        lines = [head, "| --- |" + " ---: |" * len(clients)]
        for (model, tp, pp), errors_of in by_grid.items():
            shown = (f"{errors_of[n][what]:+.0%}" if n in errors_of else "" for n in clients)
            mark = "" if model == FITTED else ", held out"
            lines.append(f"| {model}, tp{tp} pp{pp}{mark} | " + " | ".join(shown) + " |")
        tables.append("\n".join(lines))
    lines = ["| model, GPU, tp | in, out, clients | | time per token | first token |"]
    lines.append("| --- | --- | --- | ---: | ---: |")
    for server, error in others:
        name = f"{server.model}{' FP8' if server.quantization else ''}, {server.gpu}, {server.tp}"
        sizes = f"{server.inputs}, {server.outputs}, {server.clients} | {'fitted' if server.fitted else ''}"
        first = f"{error['ttft']:+.0%}" if server.counts_first_tokens else f"({error['ttft']:+.0%})"
        lines.append(f"| {name} | {sizes} | {error['tpot']:+.0%} | {first} |")
    return _PAGE.format(summary="\n".join(rows), order=order, cells="\n\n".join(tables), servers="\n".join(lines))


_NAMES = {
    "itl": "median time between tokens",
    "output_rate": "output tokens/s",
    "tpot": "time per output token",
    "ttft": "time to first token",
}
_PAGE = """# Accuracy of simulations compared with real servers

Written by `python -m benchmarks.real_pipelines FOLDER --write docs/accuracy.md`. Errors are simulated / measured - 1.
Kernel times come from [tables](cost_model.md#constants-and-their-sources); the engine is `engine=vllm`. Seven
constants were fitted to servers. Four host constants were fitted to the servers of Qwen3 0.6B on H200s. Three were
fitted to every second single-stage server: the H100's `row_us`, the rate of large FP8 GEMMs (`byte_tflops`), and the
frontend time per prompt token (`front_token_us`). All other servers are held out. The behaviour of the clients is
taken from the repositories of the measurements; whether it explains the numbers was checked on all servers.

| servers | | number | median error | 90% | 80% lie within |
| --- | --- | ---: | ---: | ---: | --- |
{summary}

{order}

## Clients of the single-stage servers

A server's times depend on its clients and flags as much as on its GPUs.

- **Qwen3 32B on H100s** (aiconfigurator's own, vLLM 0.12). Its generator sets `max_num_batched_tokens`, here
  `scheduler.max_batched_tokens`, to the prompt + 1500 + 512 (`generator/rule_plugin/vllm.rule`). Clients send ten
  requests each, and all of them count, including the first ones. With 8,192 tokens per step, vLLM's default, eight
  prompts of 1,024 would end together, twice as late as measured.
- **Llama 3.1 70B in FP8** (SemiAnalysis InferenceX). Lengths are drawn from 0.8 to 1 times the nominal ones. Clients
  send ten requests each, all at once at the start. There is no prefix cache. A 16-bit KV cache explains the times and
  the number of requests that fit, although later scripts of that repository set FP8.
- **Llama 3.1 8B and Qwen3 32B in FP8** (vLLM 0.12). With 100 output tokens, prompts arrive faster than the GPUs' peak
  rate could compute them, so they were cached: clients repeat 100 prompts, the default of AIPerf. Their TTFT does not
  count.
- TTFTs in parentheses do not count: prompts were cached, or the KV cache holds fewer requests than there are clients,
  so some requests wait for others to end.

## Known limits

- Host constants are specific to an engine version. The H100's `row_us`, 45, is for vLLM 0.12, whose host prepares a
  step after the previous one has ended, and whose sampler sorts all logits (19 us for a row of 131,072, by
  vllm-project/vllm#40376). The H200's, 6, is for vLLM 0.18, which does neither. For that version on an H100 set
  `hardware.costs.host.row_us=6`.
- FP8 decodes at 17 to 48 rows: GEMMs take up to a quarter longer than at 16 or 64 rows, by tables of the H200. This is
  not modelled, so predictions are 5 to 15% too fast there.
- Large FP8 GEMMs reach 950 TFLOP/s in servers, and up to 1,500 alone. Power may be the cause.
- vLLM's pipeline parallelism: its requests gather in one micro-batch, so `parallel.depth=1` predicts its tokens/s. A
  depth of one micro-batch per stage overestimates it by up to two times at 64 requests on eight stages. Other engines
  may behave differently.
- Decodes of two requests compared with one: real steps take 0.2 to 0.3 ms longer, while 6 us per layer are modelled.

## All servers with eight H200s

vLLM 0.18, by natoscott/benchmarks (`aiconfigurator-eval`): 4,000 prompt tokens, 1,000 output tokens; columns are
concurrent requests.

{cells}

## All single-stage servers

vLLM servers in `silicon_sample.csv` of ai-dynamo/aiconfigurator (Apache-2.0).

{servers}
"""


def main() -> int:
    bench = Benchmark(
        __doc__,
        {"folder": Path},
        write={"type": Path, "metavar": "FILE", "help": "write the page there"},
        fit={"action": "store_true", "help": "search the host's constants, and print them"},
        quick={"action": "store_true", "help": "only the eight-GPU servers"},
    )
    given = bench.given
    cells = pipelines(given.folder)
    if not cells:
        print(f"{given.folder}: no measured servers there; nothing is compared")
        return 0
    if given.fit:
        floor, layer, several, row = fit([cell for cell in cells if cell.model == FITTED])
        say(f"host: {{floor_us: {floor}, layer_us: {layer}, several_us: {several}, row_us: {row}}}")
    found, others = run(cells), run([] if given.quick else servers(given.folder))
    for server, error in (*found, *others):
        of = {"model": server.model, "gpu": server.gpu, "tp": server.tp, "pp": server.pp, "clients": server.clients}
        bench.row("errors", **of, **{f"{name}_share": value for name, value in error.items()})
    if given.write is not None:
        given.write.write_text(page(found, others), encoding="utf-8")
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
