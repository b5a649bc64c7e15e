"""Student's t: that of draws, and of printed tables."""

from __future__ import annotations

import numpy as np
import pytest

from gapless.runtime.core.student import t_quantile


@pytest.mark.parametrize("freedom", range(1, 31))
def test_t_quantile_is_that_of_the_distribution(freedom: int) -> None:
    """Compares with the share of simulated values beyond it."""
    sample = np.abs(np.random.default_rng(freedom).standard_t(freedom, 200_000))
    for level in (0.2, 0.05, 0.01):
        share = float((sample > t_quantile(level, freedom)).mean())
        assert share == pytest.approx(level, abs=5 * (level / len(sample)) ** 0.5)


@pytest.mark.parametrize(
    ("level", "freedom", "expected"),
    [
        (0.05, 1, 12.706),
        (0.05, 2, 4.303),
        (0.05, 5, 2.571),
        (0.05, 29, 2.045),
        (0.01, 4, 4.604),
        (0.001, 3, 12.924),
    ],
)
def test_t_quantile_is_the_tables(level: float, freedom: int, expected: float) -> None:
    assert t_quantile(level, freedom) == pytest.approx(expected, abs=6e-4)
