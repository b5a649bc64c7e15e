"""Simulates what a second copy of the KV cache costs while nothing fails: `python -m benchmarks.kv_copies`.

With a copy of each stage's blocks on the next stage's ranks a fault would lose no KV. It costs a send of all new keys
and values to the neighbour, and the memory that they take there. GPT-3 over 8 x 8 A100s (the paper's 5.3) serves
Figure 12's lengths at about 70, 95 and 120% of what it carries: as it is; with a network that is as much slower as the
copies make each message longer; and with half the KV blocks beside that, as the other half holds the neighbour's.

`benchmarks.faults` says what copies could save at the most: the tokens that are computed `again` after a fault.
Overrides of `gapless simulate` go behind the options. A minute and a half.
"""

from __future__ import annotations

import argparse

from gapless.conf.schema import SimulateConfig
from gapless.launch.compose import compose_one
from gapless.runtime.engine.plan import make_plan

from .faults import SETTING, row
from .support.results import add_json_option, write_json

RATES = (5, 7, 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--requests", type=int, default=6000)
    add_json_option(parser)
    arguments = parser.parse_args()
    given = (*SETTING, f"workload.num_prompts={arguments.requests}", *arguments.overrides)
    config = compose_one(given, SimulateConfig, "simulate")
    costs = config.hardware.costs
    if costs is None:
        parser.error(f"hardware={config.hardware.name}: its network is not known; choose an a100 or h100")
    plan = make_plan(config)
    per_token = 2 * max(len(layers) for layers in plan.layers)  # keys and values, in vectors of the hidden size
    slower = f"hardware.costs.network.gbps={costs.network.gbps / (1 + per_token)}"
    half = f"cache.num_blocks={plan.num_blocks // 2}"
    variants = {
        "no copies": (),
        f"a network {1 + per_token} times as slow": (slower,),
        "half the KV blocks beside it": (slower, half),
    }
    rows = []
    print(f"{'requests/s':>10}  {'':30}{'goodput':>9}{'p99 TTFT':>10}{'p99 TBT':>10}{'p99 e2e':>10}{'makespan':>10}")
    for rate in RATES:
        for name, keys in variants.items():
            found = {"rate": rate, "variant": name, **row(*given, f"workload.request_rate={rate}", *keys)}
            rows.append(found)
            print(f"{rate:10}  {name:30}{found['goodput_requests_per_s']:7.2f}/s{found['p99_ttft_s']:8.1f} s"
                  f"{found['p99_tbt_ms']:7.0f} ms{found['p99_e2e_s']:8.1f} s{found['makespan_s']:8.0f} s",
                  flush=True)  # fmt: skip
    write_json(arguments.json, "kv_copies", {"kv_copies": rows})


if __name__ == "__main__":
    main()
