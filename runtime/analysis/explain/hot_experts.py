"""Compares the expert load of a slow stage with the other stages' load."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ...core.run_record import RunRecord

_UNEVEN = 1.15  # least ratio of the busiest expert's load to that on other stages for routing to be named as a cause


def hot_experts(stage: int, record: RunRecord) -> dict[str, float]:
    """Return the evidence of an uneven expert load, by name; empty if the other stages' load is about the same.

    The load is the busiest expert's tokens over the mean of all experts.
    """
    routed = [span for span in record.spans if span.expert_load]
    own, others = ([span.expert_load for span in routed if (span.stage == stage) == is_own] for is_own in (True, False))
    if not own or not others or np.mean(own) < _UNEVEN * np.mean(others):
        return {}
    hot = Counter((span.hot_layer, span.hot_expert) for span in routed if span.stage == stage)
    (layer, expert), _ = hot.most_common(1)[0]
    loads = {"expert_load": float(np.mean(own)), "expert_load_of_others": float(np.mean(others))}
    return loads | {"hot_layer": layer, "hot_expert": expert}
