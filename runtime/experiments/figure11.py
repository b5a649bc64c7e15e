"""Figure 11: SARATHI compared with Orca's best and worst case, on one GPU."""

from __future__ import annotations

import numpy as np

from ...conf.schema import SimulateConfig
from ..report.chart import Axis, Chart, Series, series_colour
from .artifact import Artifact, Row, Simulate
from .figure9 import gains, gains_chart
from .one_gpu import (
    CHUNK,
    LLAMA_13B_BATCHES,
    balanced,
    baseline,
    equal_requests,
    makespan,
    orca_best,
    run_policy,
    sarathi,
)

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
        for name, policy in (("sarathi", sarathi(batch)), ("orca_best", orca_best(batch))):
            by_length[name][length] = slow / makespan(run_policy(requests, policy, simulate, setting))
        rows += [
            Row(NAME, "throughput of SARATHI over the baseline", setting, SARATHI[length],
                by_length["sarathi"][length]),
            Row(NAME, "throughput of Orca's best case over the baseline", setting,
                ORCA_BEST if length == 1024 else None, by_length["orca_best"][length]),
        ]  # fmt: skip
    batch = LLAMA_13B_BATCHES[1024]
    policies = {f"SARATHI C={chunk}": sarathi(batch, chunk) for chunk in PEAKS} | {"Orca, best": orca_best(batch)}
    by_ratio = gains(config, simulate, 1024, batch, policies)
    papers = [*PEAKS.values(), ORCA_BEST]
    for (label, found), paper in zip(by_ratio.items(), papers, strict=True):
        best = max(found, key=lambda ratio: found[ratio])
        setting = f"1K, B={batch}, here at P:D {best}"
        rows.append(Row(NAME, f"{label}: highest over P:D ratios", setting, paper, found[best]))
    lengths = np.array(list(LLAMA_13B_BATCHES), np.float64)
    chart = Chart(
        "figure11a", f"Figure 11a: chunk {CHUNK}, P:D = C / (B - 1)", "lines", Axis("P + D", "tokens"),
        Axis("throughput over baseline", low=None),
        tuple(
            Series(label, lengths, np.array(list(found.values())), series_colour(place))
            for place, (label, found) in enumerate(by_length.items())
        ),
    )  # fmt: skip
    notes = (
        "The paper's text gives Orca's best case at 1K, and of longer sequences that it drops close to the baseline.",
    )
    charts = chart, gains_chart("figure11b", "Figure 11b: 1K", by_ratio)
    return Artifact("Figure 11: beside Orca's iteration-level scheduling", tuple(rows), charts, notes)
