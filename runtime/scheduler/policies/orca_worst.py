"""Orca at its worst (paper 5.2): a micro-batch's requests start and end together, so prefills never overlap decodes."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from mypy_extensions import mypyc_attr

from ..group_scheduler import GroupScheduler


@mypyc_attr(allow_interpreted_subclasses=True)
class OrcaWorst(GroupScheduler):
    """Runs micro-batches of up to B requests, each until all of its requests are done.

    There are `depth` micro-batches, each with as many requests as its share of the KV cache has room for. When all
    requests of one are done, new requests replace them, independently of the other micro-batches.
    """

    def enter(self) -> None:
        """Admit groups until there is one per micro-batch in flight, each within its share of the blocks."""
        depth = self.limits.depth.most
        share = self.pool.num_blocks // depth
        while len(self.groups) < depth and (group := self.admit_group(self.limits.batch, share)):
            self.groups.append(group)
