"""Draws which policy has the shortest tail latencies for each cluster, workload and load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLORS = ("#bab0ac", "#9c755f", "#edc948", "#b07aa1", "#59a14f", "#f28e2b", "#e15759", "#4e79a7")
_DPI = 110


def draw_winners(path: Path, cells: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> None:
    """Write a PNG with a panel per cluster, a row per workload and a column per load.

    The left triangle of a square has the colour of the policy with the shortest p99 TTFT among those that reach 99% of
    the highest requests/s, the right triangle the colour of the one with the shortest p99 TBT.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Polygon

    clusters, workloads, loads = (
        list(dict.fromkeys(cell[key] for cell in cells)) for key in ("cluster", "workload", "load")
    )
    colors = dict(zip(policies, _COLORS, strict=True))
    figure = Figure(figsize=(3.4 * len(clusters), 0.55 * len(workloads) + 1.4), dpi=_DPI, layout="constrained")
    for panel, cluster in zip(figure.subplots(1, len(clusters), squeeze=False)[0], clusters, strict=True):
        for cell in (cell for cell in cells if cell["cluster"] == cluster):
            x, y = loads.index(cell["load"]), workloads.index(cell["workload"])
            for policy, corners in (
                (cell["ttft_by"], [(x, y), (x, y + 1), (x + 1, y)]),
                (cell["tbt_by"], [(x + 1, y + 1), (x, y + 1), (x + 1, y)]),
            ):
                panel.add_patch(Polygon(corners, facecolor=colors[policy], edgecolor="white"))
        panel.set(xlim=(0, len(loads)), ylim=(len(workloads), 0), title=cluster)
        panel.set_xticks([number + 0.5 for number in range(len(loads))], [load.replace(" ", "\n") for load in loads])
        panel.set_yticks([number + 0.5 for number in range(len(workloads))], workloads)
        panel.tick_params(length=0)
        for spine in panel.spines.values():
            spine.set_visible(False)
    won = {cell[key] for cell in cells for key in ("ttft_by", "tbt_by")}
    keys = [Patch(facecolor=colors[policy], label=policy) for policy in policies if policy in won]
    figure.legend(
        handles=keys,
        loc="outside lower center",
        ncols=len(keys),
        frameon=False,
        title="left: shortest p99 TTFT; right: shortest p99 TBT",
    )
    FigureCanvasAgg(figure)
    figure.savefig(path, metadata={"Software": None})
