"""Least squares without negative parts, held against the conditions of a minimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.core.least_squares import non_negative


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 40), st.integers(1, 3))
def test_no_step_makes_it_better(seed: int, columns: int, rows: int, systems: int) -> None:
    generator = np.random.default_rng(seed)
    design = generator.uniform(0, 1, (systems, rows, columns)) * 10.0 ** generator.integers(-3, 4, columns)
    weights = np.maximum(0, generator.normal(size=columns))
    seconds = design @ weights + generator.normal(size=(systems, rows))
    across = design.transpose(0, 2, 1)
    grams, moments = across @ design, (across @ seconds[:, :, None])[:, :, 0]
    together = non_negative(grams, moments)
    for gram, moment, found in zip(grams, moments, together, strict=True):
        assert (found >= 0).all()
        slope = (moment - gram @ found) / np.sqrt(np.diagonal(gram))  # of the loss, downwards
        small = 1e-5 * (1 + np.abs(moment / np.sqrt(np.diagonal(gram))).max())
        assert (slope <= small).all()
        assert (np.abs(slope[found > 0]) <= small).all()
        np.testing.assert_allclose(non_negative(gram, moment), found, rtol=1e-6, atol=1e-9)


def test_a_part_is_not_left_out_for_good() -> None:
    """To leave out the most negative part, one after the other, ends with the last part alone."""
    design = np.array([[3.0, 0.0, 2.0], [2.0, 3.0, 3.0], [2.0, 1.0, 2.0]])
    found = non_negative(design.T @ design, design.T @ np.array([1.0, 1.0, 4.0]))
    assert found == pytest.approx([13 / 33, 0.0, 13 / 33])
