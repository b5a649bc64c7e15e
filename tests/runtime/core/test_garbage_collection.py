"""The collector is out of the way for a while, and nothing is lost to it."""

from __future__ import annotations

import gc
import weakref

from gapless.runtime.core.garbage_collection import without_collector


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_it_is_off_meanwhile_and_on_again() -> None:
    assert gc.isenabled()
    with without_collector():
        assert not gc.isenabled()
        with without_collector():
            pass
        assert not gc.isenabled(), "the outer one goes on"
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_a_program_has_frozen_stays_frozen() -> None:
    knot = Knot()
    gc.freeze()
    try:
        with without_collector():
            pass
        assert not any(each is knot for each in gc.get_objects()), "the collector looks at it again"
    finally:
        gc.unfreeze()


def test_what_is_made_meanwhile_is_looked_at_with_the_old_and_still_collected() -> None:
    with without_collector():
        knot = weakref.ref(Knot())
        young = len(gc.get_objects(generation=0))
    assert len(gc.get_objects(generation=0)) < young
    assert knot() is not None
    gc.collect()
    assert knot() is None
