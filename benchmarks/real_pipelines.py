"""Says how far simulations of real servers are off: `python -m benchmarks.real_pipelines FOLDER --write FILE`.

FOLDER holds `h200/h200_pp.csv` (vLLM on eight H200s: median time between tokens, output tokens/s) and
`h200/silicon.csv` (ai-dynamo/aiconfigurator, Apache-2.0: whole servers of one stage, time to first token and per output
token). Each server is simulated as its clients loaded it, a closed loop of requests that are all alike. Only the host's
constants were fitted to servers: to those of Qwen3 0.6B in `h200_pp.csv`, by `--fit`. All other servers are held out.
FILE is `docs/accuracy.md`. Five minutes on one core.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gapless.conf.errors import ConfigError
from gapless.parallel.placement import StageLink
from gapless.runtime.cost.stage_costs import MicroBatchShape
from gapless.runtime.simulation.setting import make_setting

from .support.harness import Benchmark, say
from .support.simulated import configure, replicas_of

MODELS = {  # by the names of the files: overrides, layers, whether the host's constants were fitted to its servers
    "qwen3-0.6b": (
        "model=qwen3-8b model.architecture.hidden_size=1024 model.architecture.num_layers=28 "
        "model.architecture.num_heads=16 model.architecture.ffn_size=3072 model.architecture.tie_embeddings=true",
        28,
    ),
    "qwen3-8b": ("model=qwen3-8b", 36),
    "qwen3-14b": (
        "model=qwen3-8b model.architecture.hidden_size=5120 model.architecture.num_layers=40 "
        "model.architecture.num_heads=40 model.architecture.ffn_size=17408",
        40,
    ),
    "qwen3-32b": (
        "model=qwen3-8b model.architecture.hidden_size=5120 model.architecture.num_layers=64 "
        "model.architecture.num_heads=64 model.architecture.ffn_size=25600",
        64,
    ),
    "llama-3.1-8b": ("model=llama3-8b", 32),
    "llama-3.1-70b": ("model=llama2-70b model.architecture.vocab_size=128256", 80),
}
FITTED = "qwen3-0.6b"
# As vLLM runs: decodes first, then chunks, up to its budget. Its requests flow together into one micro-batch, since new
# prompts join whichever comes back: with one in flight its rates of tokens are right, with one a stage they are not.
ENGINE = "scheduler=token_budget scheduler.budget=8192 parallel.depth=1"
ROUNDS = 3  # requests of each client; the first does not count


@dataclass(frozen=True)
class Server:
    """A server that was measured: its setting, and what its clients saw, in seconds or tokens/s."""

    model: str
    quantization: str | None
    gpu: str
    tp: int
    pp: int
    inputs: int
    outputs: int
    clients: int
    seen: dict[str, float]

    @property
    def keys(self) -> str:
        """The overrides of its simulation."""
        own, layers = MODELS[self.model]
        each, more = divmod(layers, self.pp)  # what is left over lies on the stages before the last
        split = ",".join(str(each + (self.pp - 1 - more <= stage < self.pp - 1)) for stage in range(self.pp))
        return (
            f"{own} model.quantization={self.quantization or 'null'} hardware={self.gpu} parallel.tp={self.tp} "
            f"parallel.pp={self.pp} parallel.layers=[{split}] {ENGINE} workload=fixed workload.input_len={self.inputs} "
            f"workload.output_len={self.outputs} workload.max_concurrency={self.clients} "
            f"workload.num_prompts={ROUNDS * self.clients}"
        )


def pipelines(folder: Path) -> list[Server]:
    """Read the servers of eight GPUs."""
    return [
        Server(
            *(line["model"], "fp8" if line["dtype"] == "fp8" else None, "h200", int(line["tp"]), int(line["pp"])),
            *(4000, 1000, int(line["concurrency"])),
            {"itl": float(line["itl_p50_ms"]) / 1e3, "output_rate": float(line["output_tok_s"])},
        )
        for line in _lines(folder / "h200" / "h200_pp.csv")
    ]


def servers(folder: Path) -> list[Server]:
    """Read vLLM's servers of one stage."""
    found = []
    for line in _lines(folder / "h200" / "silicon.csv"):
        name = line["model"].rpartition("/")[2].lower().removesuffix("-fp8").removesuffix("-instruct")
        if line["backend"] == "vllm" and name in MODELS:
            sizes = (int(line[key]) for key in ("isl", "osl", "concurrency"))
            seen = {"ttft": float(line["ttft_ms"]) / 1e3, "tpot": float(line["tpot_ms"]) / 1e3}
            fp8 = "fp8" if line["dtype"] == "fp8" else None
            found.append(Server(name, fp8, line["gpu"], int(line["tp"]), int(line["pp"]), *sizes, seen))
    return found


def _lines(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def simulated(server: Server) -> dict[str, float] | None:
    """Simulate a server; return what its clients would see, None where its model does not fit.

    The median time between tokens is over all pairs of tokens, as it is where prompts interrupt decodes.
    """
    try:
        (replica,) = replicas_of(configure(server.keys))
    except ConfigError as error:
        say(f"{server.model} on {server.gpu}, tp {server.tp}: {error}")
        return None
    requests = [(each.arrival, np.asarray(each.token_times)) for each in replica.record.requests]
    counted = requests[server.clients :]
    begin, end = (sorted(times[-1] for _, times in requests)[at] for at in (server.clients - 1, -1))
    return {
        "itl": float(np.median(np.concatenate([np.diff(times) for _, times in counted]))),
        "output_rate": sum(len(times) for _, times in counted) / (end - begin),
        "ttft": float(np.mean([times[0] - arrival for arrival, times in counted])),
        "tpot": float(np.mean([(times[-1] - times[0]) / max(1, len(times) - 1) for _, times in counted])),
    }


Found = list[tuple[Server, dict[str, float]]]


def run(all_servers: Iterable[Server]) -> Found:
    """Simulate servers; return each with simulated / measured - 1 of what was measured."""
    found = []
    for server in all_servers:
        if (predicted := simulated(server)) is not None:
            found.append((server, {name: predicted[name] / value - 1 for name, value in server.seen.items()}))
    return found


def fit(cells: Sequence[Server]) -> tuple[float, ...]:
    """Search the host's constants, in microseconds, on the median times between tokens of the fitted model."""
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
    """Return how often the grid of most tokens/s is foreseen, of how many loads, and where it is not."""
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
    """Say the median and the 90th percentile of absolute errors, and the range that 80% of signed ones lie in."""
    low, high = np.percentile(errors, (10, 90))
    off = np.abs(errors)
    return f"{np.median(off):.1%} | {np.percentile(off, 90):.1%} | {low:+.0%} to {high:+.0%}"


def page(cells: Found, others: Found) -> str:
    """Write the page: summaries, then every server with its signed errors."""
    rows = []
    kinds: list[tuple[str, str, Found, Callable[[Server], bool]]] = [
        ("8 x H200, Qwen3 0.6B (fitted: the host)", "itl", cells, lambda s: s.model == FITTED),
        ("8 x H200, held out", "itl", cells, lambda s: s.model != FITTED),
        ("8 x H200, Qwen3 0.6B", "output_rate", cells, lambda s: s.model == FITTED),
        ("8 x H200, held out", "output_rate", cells, lambda s: s.model != FITTED),
        ("one stage, BF16, held out", "tpot", others, lambda s: s.quantization is None),
        ("one stage, FP8, held out", "tpot", others, lambda s: s.quantization is not None),
        ("one stage, held out", "ttft", others, lambda s: True),
    ]
    for name, what, found, chosen in kinds:
        errors = [error[what] for server, error in found if chosen(server)]
        if errors:
            rows.append(f"| {name} | {_NAMES[what]} | {len(errors)} | {percent(errors)} |")
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
    lines = ["| model, GPU, tp | in, out, clients | time a token | first token |", "| --- | --- | ---: | ---: |"]
    for server, error in others:
        name = f"{server.model}{' FP8' if server.quantization else ''}, {server.gpu}, {server.tp}"
        sizes = f"{server.inputs}, {server.outputs}, {server.clients}"
        lines.append(f"| {name} | {sizes} | {error['tpot']:+.0%} | {error['ttft']:+.0%} |")
    return _PAGE.format(summary="\n".join(rows), order=order, cells="\n\n".join(tables), servers="\n".join(lines))


_NAMES = {
    "itl": "median time between tokens",
    "output_rate": "output tokens/s",
    "tpot": "time per output token",
    "ttft": "time to first token",
}
_PAGE = """# How far simulations are off on real servers

Written by `python -m benchmarks.real_pipelines FOLDER --write docs/accuracy.md`. Errors are simulated / measured - 1.
Nothing of a server was fitted but four constants of the host, on those of Qwen3 0.6B; kernels are those of
[tables](cost_model.md#constants-and-their-sources). All engines are vLLM.

| servers | | number | median error | 90% | 80% lie within |
| --- | --- | ---: | ---: | ---: | --- |
{summary}

{order}

## Where not to trust it

- First tokens: simulated clients begin together and stay together, as their requests are all alike. Measured ones did
  not; with clients that begin one after the other, first tokens come much too early instead.
- Qwen3 32B in BF16 on H100s: real steps take 0.04 ms longer for each request, of which neither tables nor the servers
  of other models and of the same one in FP8 show anything.
- Llama 3.1 8B in FP8 with 100 output tokens: the load is mostly prompts, and its first tokens come earlier than the
  card can compute them, so prompts were cached.
- vLLM's policy over stages: its requests flow together into one micro-batch, so `parallel.depth=1` foresees its
  tokens/s, and a depth of one micro-batch a stage overrates it by up to two times at 64 requests on eight stages. Other
  engines do not have to behave so.
- Decodes of one request against two: real steps take 0.2 to 0.3 ms longer for two, of which 6 us a layer are modelled.
- Hosts: the constants are those of one kind of server and of one version of vLLM.

## Every server of eight H200s

4,000 prompt tokens, 1,000 output tokens; columns are requests at a time (natoscott/benchmarks, `aiconfigurator-eval`).

{cells}

## Every server of one stage

vLLM's in `silicon_sample.csv` of ai-dynamo/aiconfigurator (Apache-2.0); none was fitted.

{servers}
"""


def main() -> int:
    bench = Benchmark(
        __doc__,
        {"folder": Path},
        write={"type": Path, "metavar": "FILE", "help": "write the page there"},
        fit={"action": "store_true", "help": "search the host's constants, and print them"},
        quick={"action": "store_true", "help": "only the servers of eight GPUs"},
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
