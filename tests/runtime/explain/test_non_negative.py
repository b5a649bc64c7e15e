"""Least squares without negative parts, held against the conditions of a minimum."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.explain.non_negative import non_negative_least_squares


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 40))
def test_no_step_makes_it_better(seed: int, columns: int, rows: int) -> None:
    generator = np.random.default_rng(seed)
    design = generator.uniform(0, 1, (rows, columns)) * 10.0 ** generator.integers(-3, 4, columns)
    seconds = design @ np.maximum(0, generator.normal(size=columns)) + generator.normal(size=rows)
    gram, moment = design.T @ design, design.T @ seconds
    found = non_negative_least_squares(gram, moment)
    assert (found >= 0).all()
    slope = (moment - gram @ found) / np.sqrt(np.diagonal(gram))  # of the loss, downwards
    small = 1e-5 * (1 + np.abs(moment / np.sqrt(np.diagonal(gram))).max())
    assert (slope <= small).all()
    assert (np.abs(slope[found > 0]) <= small).all()
