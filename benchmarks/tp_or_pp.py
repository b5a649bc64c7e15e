"""Simulates one model over two nodes as tensor- and as pipeline-parallel grids: `python -m benchmarks.tp_or_pp`.

GPT-3 on 2 x 8 A100s (H100s on `cluster=dgx-h100`) serves 400 prompts of 1,024 tokens with 256 output tokens each, all
there at once, and then a few of them alone, on each choice of `cluster`; on 25 Gbit/s Ethernet also with each node in a
rack of its own. Overrides of `gapless simulate` go behind the options. Half a minute.
"""

from __future__ import annotations

import argparse

from .faults import row
from .support.results import add_json_option, write_json

SETTING = (
    "model=gpt3-175b",
    "scheduler=sarathi",
    "workload=fixed",
    "workload.input_len=1024",
    "workload.output_len=256",
    "simulation.record=false",
    "slo.ttft_ms=10000",
)
CLUSTERS = {
    "dgx-a100": ("hardware=a100-80g", "cluster=dgx-a100"),
    "dgx-h100": ("hardware=h100", "cluster=dgx-h100"),
    "ethernet-100g": ("hardware=a100-80g", "cluster=ethernet-100g"),
    "ethernet-25g": ("hardware=a100-80g", "cluster=ethernet-25g"),
    "ethernet-25g, 2 racks, 4:1": (
        "hardware=a100-80g", "cluster=ethernet-25g", "cluster.nodes_per_rack=1", "cluster.oversubscription=4",
    ),
    "pcie": ("hardware=a100-80g", "cluster=pcie"),
}  # fmt: skip
GRIDS = ((16, 1), (8, 2), (4, 4), (2, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--requests", type=int, default=400)
    add_json_option(parser)
    arguments = parser.parse_args()
    rows = []
    print(f"{'cluster':28}{'tp':>4}{'pp':>4}{'all at once':>13}{'p99 TBT':>11}{'alone: TTFT':>13}{'TBT':>11}")
    for cluster, keys in CLUSTERS.items():
        for tp, pp in GRIDS:
            given = (*SETTING, *keys, f"parallel.tp={tp}", f"parallel.pp={pp}", *arguments.overrides)
            full = row(*given, f"workload.num_prompts={arguments.requests}")
            alone = row(*given, "workload.num_prompts=20", "workload.request_rate=0.02")
            rows.append({
                "cluster": cluster, "tp": tp, "pp": pp, "makespan_s": full["makespan_s"],
                "p99_tbt_ms": full["p99_tbt_ms"], "alone_ttft_ms": 1e3 * alone["p99_ttft_s"],
                "alone_tbt_ms": alone["p99_tbt_ms"],
            })  # fmt: skip
            found = rows[-1]
            print(f"{cluster:28}{tp:4}{pp:4}{found['makespan_s']:11.1f} s{found['p99_tbt_ms']:8.1f} ms"
                  f"{found['alone_ttft_ms']:10.1f} ms{found['alone_tbt_ms']:8.1f} ms", flush=True)  # fmt: skip
    write_json(arguments.json, "tp_or_pp", {"tp_or_pp": rows})


if __name__ == "__main__":
    main()
