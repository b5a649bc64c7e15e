"""Orca at its worst (paper 5.2): the requests of a micro-batch start and end together, so no prefill meets a decode."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from mypy_extensions import mypyc_attr

from ..groups import GroupScheduler


@mypyc_attr(allow_interpreted_subclasses=True)
class OrcaWorst(GroupScheduler):
    """Each of the `depth` micro-batches holds up to B requests; when all of them are done, the next B enter in their
    place, whatever the other micro-batches are at."""

    def enter(self) -> None:
        while len(self.groups) < self.limits.depth and (group := self.admit_group(self.limits.batch)):
            self.groups.append(group)
