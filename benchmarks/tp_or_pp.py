"""Compares tensor and pipeline parallelism, and their combinations, in simulations: `python -m benchmarks.tp_or_pp`.

GPT-3 on 2 x 8 A100s (H100s on `cluster=dgx-h100`) serves 400 prompts of 1,024 tokens with 256 output tokens each, all
at once, and then a few of them alone, on each choice of `cluster`, including tp 16 across both nodes; on 25 Gbit/s
Ethernet also with each node in its own rack. Half a minute.

With `--page FILE` instead, `gapless tune` selects grid and chunk for several models, nodes and closed loops, with the
defaults of each of `--engines` and one pipeline over all devices, and the answers are written as a page. Several
minutes.

Overrides of `gapless simulate` or `tune` follow the options.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

from gapless.conf.tuning import TuneConfig
from gapless.launch.compose import compose_one
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.simulation.tuning.search import Search
from gapless.runtime.simulation.tuning.search_result import SearchResult

from .support.harness import Benchmark, Row, figures, words
from .support.simulated import configure, fleet_of

SETTING = "model=gpt3-175b scheduler=sarathi workload=fixed workload.input_len=1024 workload.output_len=256"
CLUSTERS = {
    "dgx-a100": "hardware=a100-80g cluster=dgx-a100",
    "dgx-h100": "hardware=h100 cluster=dgx-h100",
    "ethernet-100g": "hardware=a100-80g cluster=ethernet-100g",
    "ethernet-25g": "hardware=a100-80g cluster=ethernet-25g",
    "ethernet-25g, 2 racks, 4:1": "hardware=a100-80g cluster=ethernet-25g cluster.nodes_per_rack=1 "
    "cluster.oversubscription=4",
    "pcie": "hardware=a100-80g cluster=pcie",
}
GRIDS = ((16, 1), (8, 2), (4, 4), (2, 8))

LOOP = (
    "workload=fixed slo.ttft_p99_ms=null slo.tbt_p99_ms=null seeds=1 search.exhaustive=true "
    "search.replicas=[1] search.layers=false search.batch=false search.depth=[0] search.finalists=1"
)
DESIGNS = (  # model, devices, keys
    ("qwen3-8b", "8 H100", "hardware=h100 cluster=dgx-h100"),
    ("llama2-70b", "8 H100", "hardware=h100 cluster=dgx-h100"),
    ("llama2-70b", "8 A100 over PCIe", "hardware=a100-80g cluster=pcie"),
    ("llama2-70b", "2 x 8 H100, InfiniBand", "hardware=h100 cluster=dgx-h100 nodes=2"),
    ("gpt3-175b", "2 x 8 H100, InfiniBand", "hardware=h100 cluster=dgx-h100 nodes=2"),
    ("gpt3-175b", "2 x 8 A100, 25 Gbit/s", "hardware=a100-80g cluster=ethernet-25g nodes=2"),
)
CLIENTS = (1, 16, 128)
PAGE = """# TP, PP or both?

Written by `python -m benchmarks.tp_or_pp --page docs/tp_or_pp.md` on {date}; `--engines vllm,gapless` asks both.
Simulated by `gapless tune` with one pipeline over all devices, in a closed loop: each client sends a prompt of 1,000
tokens, waits for its 200 output tokens, and sends the next. Every `tp` within a node is tried with the `pp` that fills
the devices, each with chunks (vLLM: budgets) of 512, 2,048 and 8,192 tokens. Differences below the
[errors of simulations](accuracy.md) mean nothing.

It depends on the engine. vLLM's requests merge into one micro-batch, so its stages compute in turn
([engines](simulate.md#engines)). An engine that keeps a micro-batch on each stage gains more from a pipeline
([how much](../benchmarks/results/tp_or_pp.md#a-micro-batch-on-each-stage)).

The last three columns are the best rates of tensor parallelism alone, pipeline parallelism alone and both, as shares of
the best; - is impossible, e.g. TP over several nodes or more stages than layers.

| model | devices | clients | engine | best | chunk | requests/s | TP | PP | both |
| --- | --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |
{rows}

For your own model, nodes and load (without `search.replicas=[1]` also with several replicas):

```sh
gapless tune engine=vllm hardware=h100 cluster=dgx-h100 nodes=2 search.replicas=[1] workload=fixed \\
    workload.max_concurrency=16 slo.ttft_p99_ms=null slo.tbt_p99_ms=null
```
"""


def main() -> int:
    bench = Benchmark(__doc__, requests=400, page="", engines=["vllm"], overrides=True)
    if bench.given.page:
        return _page(bench, Path(bench.given.page))
    for cluster, keys in CLUSTERS.items():
        for tp, pp in GRIDS:
            given = (SETTING, keys, f"parallel.tp={tp} parallel.pp={pp}", *bench.given.overrides)
            full = simulate(*given, f"workload.num_prompts={bench.given.requests}")
            alone = simulate(*given, "workload.num_prompts=20 workload.request_rate=0.02")
            lone = {f"alone_{name}": alone[key] for name, key in (("ttft_ms", "p99_ttft_ms"), ("tbt_ms", "p99_itl_ms"))}
            bench.row("tp_or_pp", cluster=cluster, tp=tp, pp=pp, **figures(full, "makespan_s", "p99_tbt_ms"), **lone)
    return bench.end()


def simulate(*keys: str) -> Row:
    return summarize(fleet_of(configure(*keys)))


def tuned(*keys: str) -> SearchResult:
    """Search all grids of a single pipeline for a closed loop exhaustively."""
    return Search(compose_one(words(LOOP, *keys), TuneConfig, "tune")).run()


def rates(found: SearchResult) -> dict[tuple[int, int], float]:
    """Return the requests/s of each grid (tp, pp) with its best chunk."""
    best: dict[tuple[int, int], float] = {}
    for tried in found.tried:
        grid = tried.candidate.tp, tried.candidate.pp
        best[grid] = max(best.get(grid, 0.0), tried.low)
    return best


def _page(bench: Benchmark, path: Path) -> int:
    for (model, devices, keys), clients in itertools.product(DESIGNS, CLIENTS):
        for engine in bench.given.engines:
            load = f"workload.max_concurrency={clients} workload.num_prompts={20 + 2 * clients}"
            lengths = "workload.input_len=1000 workload.output_len=200"
            chunks = "search.chunk=[512,2048,8192]"
            found = tuned(f"engine={engine} model={model}", keys, load, lengths, chunks, *bench.given.overrides)
            assert found.winner is not None
            row: Row = {"model": model, "devices": devices, "clients": clients, "engine": engine}
            row |= {
                "best": found.winner.candidate.grid,
                "chunk": found.winner.candidate.chunk,
                "requests_per_s": found.winner.rate,
            }
            kinds: defaultdict[str, float] = defaultdict(float)
            for (tp, pp), rate in rates(found).items():
                kind = "tp_share" if pp == 1 else "pp_share" if tp == 1 else "both_share"
                kinds[kind] = max(kinds[kind], rate / found.winner.rate)
            bench.row("design", **row, **{kind: kinds.get(kind) for kind in ("tp_share", "pp_share", "both_share")})
    lines = [" | ".join(_cell(value) for value in row.values()) for row in bench.tables["design"]]
    text = PAGE.format(date=date.today(), rows="\n".join(f"| {line} |" for line in lines))
    path.write_text(text, encoding="utf-8")
    return bench.end()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:.1f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    sys.exit(main())
