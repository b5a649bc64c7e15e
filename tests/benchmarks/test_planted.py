"""Planted problems: each costs what its size says, and the judge tells right from wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import planted
from benchmarks.planted import judged, values_with
from benchmarks.support.plants import ROOTS, SIZES, Plant, healthy, plants
from benchmarks.support.simulated import configure

SHARES = {"small": (0.07, 0.16), "medium": (0.18, 0.45), "large": (0.5, 1.0)}
QUICK = ("large chunk", "long prompt", "split")


def test_every_kind_has_every_size() -> None:
    assert Counter((each.kind, each.size) for each in plants()) == Counter((k, s) for k in ROOTS for s in SIZES)
    assert len(healthy()) == 20
    for each in plants():
        assert each.planted != each.without, each.name


@pytest.mark.parametrize(
    "plant",
    [each if each.kind in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in plants()],
    ids=lambda each: each.name,
)
def test_a_plant_costs_what_its_size_says(plant: Plant) -> None:
    before, after = (values_with(configure(*keys))[plant.metric] for keys in (plant.planted, plant.without))
    low, high = SHARES[plant.size]
    assert low <= 1 - after / before <= high


def test_the_judge_finds_the_undoing_change_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "SECONDS", 2.0)
    plant = next(each for each in plants() if each.name == "split, small")
    row = judged(plant)
    assert row["best"] == plant.undo
    assert row["best_saves_share"] == pytest.approx(row["truth_share"])
    assert (row["right"], row["within"], row["best_change"]) == (True, True, True), row
