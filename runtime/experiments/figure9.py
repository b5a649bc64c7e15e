"""Figure 9: SARATHI's throughput over the baseline's by P:D ratio, sequence length and chunk."""

from __future__ import annotations

import numpy as np

from ...conf.policies import SchedulerConfig
from ...conf.schema import SimulateConfig
from ..report.charts import Axis, Chart, Series, series_colour
from .artifact import Artifact, Row, Simulate
from .one_gpu import LLAMA_13B_BATCHES, alike, baseline, makespan, run, sarathi

NAME = "Figure 9"
CHUNKS = (128, 256, 512)
RATIOS = (1, 2, 5, 10, 14, 20, 28, 40, 64, 100, 200)  # the paper's range (6), its two peaks among them
PEAKS = {256: (14, 1.27), 512: (28, 1.23)}  # at 1K, by chunk: the P:D ratio and the gain


def figure9(config: SimulateConfig, simulate: Simulate) -> Artifact:
    """Whole runs of alike requests at each P:D ratio, for each length's largest batch."""
    charts, rows = [], []
    for letter, (length, batch) in zip("abc", LLAMA_13B_BATCHES.items(), strict=True):
        found = gains(config, simulate, length, batch, {f"C={chunk}": sarathi(batch, chunk) for chunk in CHUNKS})
        charts.append(gains_chart(f"figure9{letter}", f"Figure 9{letter}: {length // 1024}K, B={batch}", found))
        if length != 1024:
            continue
        for chunk, (ratio, gain) in PEAKS.items():
            by_ratio, setting = found[f"C={chunk}"], f"1K, B={batch}, C={chunk}"
            best = max(by_ratio, key=lambda ratio: by_ratio[ratio])
            rows += [
                Row(NAME, "throughput over the baseline", f"{setting}, P:D {ratio}", gain, by_ratio[ratio]),
                Row(NAME, "the same at its peak", f"{setting}, here at P:D {best}", gain, by_ratio[best]),
                Row(NAME, "P:D ratio of the peak", setting, ratio, best),
            ]
        smallest = max(found["C=128"].values())
        rows.append(Row(NAME, "throughput over the baseline, at its peak", f"1K, B={batch}, C=128", None, smallest))
    notes = (
        f"P:D ratios tried: {', '.join(map(str, RATIOS))}. Each point is a run of {config.workload.num_prompts} "
        "requests or a few more, all alike and all there at the start.",
    )
    return Artifact("Figure 9: gain by P:D ratio", tuple(rows), tuple(charts), notes)


def gains(
    config: SimulateConfig, simulate: Simulate, length: int, batch: int, policies: dict[str, SchedulerConfig]
) -> dict[str, dict[int, float]]:
    """Throughput of each policy over the baseline's, by P:D ratio."""
    found: dict[str, dict[int, float]] = {label: {} for label in policies}
    for ratio in RATIOS:
        requests = alike(config, length, ratio, batch)
        setting = f"{length // 1024}K, P:D {ratio}"
        slow = makespan(run(requests, baseline(batch), simulate, setting))
        for label, policy in policies.items():
            found[label][ratio] = slow / makespan(run(requests, policy, simulate, f"{setting}, {label}"))
    return found


def gains_chart(name: str, title: str, found: dict[str, dict[int, float]]) -> Chart:
    series = tuple(
        Series(label, np.array(list(by), np.float64), np.array(list(by.values())), series_colour(place))
        for place, (label, by) in enumerate(found.items())
    )
    return Chart(name, title, "lines", Axis("P:D"), Axis("throughput over baseline", low=None), series)
