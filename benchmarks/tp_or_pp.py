"""Simulates one model over two nodes as tensor- and as pipeline-parallel grids: `python -m benchmarks.tp_or_pp`.

GPT-3 on 2 x 8 A100s (H100s on `cluster=dgx-h100`) serves 400 prompts of 1,024 tokens with 256 output tokens each, all
there at once, and then a few of them alone, on each choice of `cluster`; on 25 Gbit/s Ethernet also with each node in a
rack of its own. Overrides of `gapless simulate` go behind the options. Half a minute.
"""

from __future__ import annotations

import sys

from .faults import simulate
from .support.harness import Benchmark

SETTING = (
    "model=gpt3-175b scheduler=sarathi workload=fixed workload.input_len=1024 workload.output_len=256 "
    "simulation.record=false slo.ttft_ms=10000"
)
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


def main() -> int:
    bench = Benchmark(__doc__, requests=400, overrides=True)
    for cluster, keys in CLUSTERS.items():
        for tp, pp in GRIDS:
            given = (SETTING, keys, f"parallel.tp={tp} parallel.pp={pp}", *bench.given.overrides)
            full = simulate(*given, f"workload.num_prompts={bench.given.requests}")
            alone = simulate(*given, "workload.num_prompts=20 workload.request_rate=0.02")
            shown = {"makespan_s": full["makespan_s"], "p99_tbt_ms": full["p99_tbt_ms"]}
            shown |= {"alone_ttft_ms": 1e3 * alone["p99_ttft_s"], "alone_tbt_ms": alone["p99_tbt_ms"]}
            bench.row("tp_or_pp", cluster=cluster, tp=tp, pp=pp, **shown)
    return bench.end()


if __name__ == "__main__":
    sys.exit(main())
