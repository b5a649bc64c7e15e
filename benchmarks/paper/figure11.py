"""Figure 11: SARATHI compared with Orca's best and worst case, on one GPU."""

from __future__ import annotations

from gapless.conf.policies import OrcaBestConfig
from gapless.conf.schema import SimulateConfig
from gapless.runtime.analysis.drawing.chart import Axis

from .artifact import Artifact, Row, Simulate
from .charts import line_chart
from .figure9 import gains, gains_chart
from .one_gpu import CHUNK, LLAMA_13B_BATCHES, balanced, baseline, equal_requests, makespan, run_policy, sarathi

NAME = "Figure 11"
SARATHI = {1024: 1.27, 2048: 1.25, 3072: 1.23}  # throughput over the baseline's, by length (11a)
ORCA_BEST = 1.11  # the same of Orca's best case at 1K, and its highest over P:D ratios
PEAKS = {256: 1.27, 512: 1.23}  # SARATHI's highest over P:D ratios, by chunk (11b)


def figure11(config: SimulateConfig, simulate: Simulate) -> Artifact:
    """Simulate whole runs of equal requests. Orca's worst case is the baseline (5.2)."""
    rows, by_length = [], dict[str, dict[int, float]](sarathi={}, orca_best={})
    for length, batch in LLAMA_13B_BATCHES.items():
        ratio = balanced(batch)
        requests = equal_requests(config, length, ratio, batch)
        setting = f"{length // 1024}K, B={batch}, P:D {ratio:.1f}"
        slow = makespan(run_policy(requests, baseline(batch), simulate, setting))
        for name, policy in (("sarathi", sarathi(batch)), ("orca_best", OrcaBestConfig(batch=batch))):
            by_length[name][length] = slow / makespan(run_policy(requests, policy, simulate, setting))
        gain, orca_gain = by_length["sarathi"][length], by_length["orca_best"][length]
        orca = ORCA_BEST if length == 1024 else None
        rows += [
            Row(NAME, "throughput of SARATHI over the baseline", setting, SARATHI[length], gain),
            Row(NAME, "throughput of Orca's best case over the baseline", setting, orca, orca_gain),
        ]
    batch = LLAMA_13B_BATCHES[1024]
    policies = {f"SARATHI C={chunk}": sarathi(batch, chunk) for chunk in PEAKS}
    by_ratio = gains(config, simulate, 1024, batch, {**policies, "Orca, best": OrcaBestConfig(batch=batch)})
    papers = [*PEAKS.values(), ORCA_BEST]
    for (label, found), paper in zip(by_ratio.items(), papers, strict=True):
        best = max(found, key=lambda ratio: found[ratio])
        setting = f"1K, B={batch}, here at P:D {best}"
        rows.append(Row(NAME, f"{label}: highest over P:D ratios", setting, paper, found[best]))
    title, gain_axis = f"Figure 11a: chunk {CHUNK}, P:D = C / (B - 1)", Axis("throughput over baseline", low=None)
    chart = line_chart("figure11a", title, Axis("P + D", "tokens"), gain_axis, by_length)
    notes = (
        "The paper's text gives Orca's best case at 1K, and of longer sequences that it drops close to the baseline.",
    )
    charts = chart, gains_chart("figure11b", "Figure 11b: 1K", by_ratio)
    return Artifact("Figure 11: beside Orca's iteration-level scheduling", tuple(rows), charts, notes)
