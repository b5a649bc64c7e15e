"""Compares the expert load of a slow stage with the other stages' load."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..core.run_record import RunRecord

_UNEVEN = 1.15  # times the load of the busiest expert on other stages, from which on routing is named as a cause


def hot_experts(stage: int, record: RunRecord) -> dict[str, float]:
    """Return the numbers that show an uneven load, by name; none if the other stages' load is about the same.

    Loads are the busiest expert's tokens over the mean of all.
    """
    routed = [span for span in record.spans if span.expert_load]
    own, others = ([span.expert_load for span in routed if (span.stage == stage) == is_own] for is_own in (True, False))
    if not own or not others or np.mean(own) < _UNEVEN * np.mean(others):
        return {}
    hot = Counter((span.hot_layer, span.hot_expert) for span in routed if span.stage == stage)
    (layer, expert), _ = hot.most_common(1)[0]
    loads = {"expert_load": float(np.mean(own)), "expert_load_of_others": float(np.mean(others))}
    return loads | {"hot_layer": layer, "hot_expert": expert}
