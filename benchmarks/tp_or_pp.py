"""Simulates one model over two nodes as tensor- and as pipeline-parallel grids: `python -m benchmarks.tp_or_pp`.

GPT-3 on 2 x 8 A100s serves 400 prompts of 1,024 tokens with 256 output tokens each, all there at once, and then a few
of them alone. The nodes are joined by InfiniBand with an adapter of 200 Gbit/s a GPU, as measured; by one adapter of
100 Gbit/s Ethernet a node; or by one of 25 Gbit/s. The rates of Ethernet are assumed: 0.9 of the line's, with the least
time of a message as measured on InfiniBand. Overrides of `gapless simulate` go behind the options. A minute.
"""

from __future__ import annotations

import argparse

from .faults import row
from .support.results import add_json_option, write_json

SETTING = ("model=gpt3-175b", "hardware=a100-80g", "scheduler=sarathi", "workload=fixed", "workload.input_len=1024",
           "workload.output_len=256", "simulation.record=false", "slo.ttft_ms=10000")
NETWORKS = {
    "InfiniBand, 200 Gbit/s a GPU": (),
    "Ethernet, 100 Gbit/s a node": ("hardware.network_adapters=1", "hardware.costs.network.gbps=11.2"),
    "Ethernet, 25 Gbit/s a node": ("hardware.network_adapters=1", "hardware.costs.network.gbps=2.8"),
}
GRIDS = ((16, 1), (8, 2), (4, 4), (2, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--requests", type=int, default=400)
    add_json_option(parser)
    arguments = parser.parse_args()
    rows = []
    print(f"{'':32}{'tp':>4}{'pp':>4}{'all at once':>13}{'p99 TBT':>11}{'alone: TTFT':>13}{'TBT':>11}")
    for network, keys in NETWORKS.items():
        for tp, pp in GRIDS:
            given = (*SETTING, *keys, f"parallel.tp={tp}", f"parallel.pp={pp}", *arguments.overrides)
            full = row(*given, f"workload.num_prompts={arguments.requests}")
            alone = row(*given, "workload.num_prompts=20", "workload.request_rate=0.02")
            rows.append({
                "network": network, "tp": tp, "pp": pp, "makespan_s": full["makespan_s"],
                "p99_tbt_ms": full["p99_tbt_ms"], "alone_ttft_ms": 1e3 * alone["p99_ttft_s"],
                "alone_tbt_ms": alone["p99_tbt_ms"],
            })  # fmt: skip
            found = rows[-1]
            print(f"{network:32}{tp:4}{pp:4}{found['makespan_s']:11.1f} s{found['p99_tbt_ms']:8.1f} ms"
                  f"{found['alone_ttft_ms']:10.1f} ms{found['alone_tbt_ms']:8.1f} ms", flush=True)  # fmt: skip
    write_json(arguments.json, "tp_or_pp", {"tp_or_pp": rows})


if __name__ == "__main__":
    main()
