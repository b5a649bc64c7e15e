"""Orca at its worst (paper 5.2): the requests of a micro-batch start and end together, so no prefill meets a decode."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from mypy_extensions import mypyc_attr

from ..groups import GroupScheduler


@mypyc_attr(allow_interpreted_subclasses=True)
class OrcaWorst(GroupScheduler):
    """Each of the `depth` micro-batches holds up to B requests, as many as its share of the KV cache has room for. When
    all of them are done, the next ones enter in their place, whatever the other micro-batches are at."""

    def enter(self) -> None:
        depth = self.limits.depth.most
        share = self.pool.num_blocks // depth
        while len(self.groups) < depth and (group := self.admit_group(self.limits.batch, share)):
            self.groups.append(group)
