"""Orca at its worst (paper 5.2): the requests of a micro-batch start and end together, so no prefill meets a decode."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from mypy_extensions import mypyc_attr

from ..group_scheduler import GroupScheduler


@mypyc_attr(allow_interpreted_subclasses=True)
class OrcaWorst(GroupScheduler):
    """The policy of micro-batches that each hold up to B requests until all of them are done.

    There are `depth` of them, each of as many requests as its share of the KV cache has room for. When all of them are
    done, the next ones enter in their place, whatever the other micro-batches are at.
    """

    def enter(self) -> None:
        """Admit groups until there are as many as micro-batches in flight; each may own its share of the blocks."""
        depth = self.limits.depth.most
        share = self.pool.num_blocks // depth
        while len(self.groups) < depth and (group := self.admit_group(self.limits.batch, share)):
            self.groups.append(group)
