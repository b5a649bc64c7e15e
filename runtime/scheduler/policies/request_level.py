"""FasterTransformer's request-level scheduling (paper 4.1): a batch enters together and leaves together."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from mypy_extensions import mypyc_attr

from ..group_scheduler import GroupScheduler


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestLevel(GroupScheduler):
    """Admits up to B x depth requests together, split into `depth` micro-batches; the next batch waits for all."""

    def enter(self) -> None:
        """Once all groups are done, admit as many requests as fit, and split them into groups of equal size."""
        if not self.groups:
            entered = self.admit_group(self.limits.running, self.pool.num_blocks)
            size = -(-len(entered) // self.limits.depth.most)
            self.groups.extend(entered[i : i + size] for i in range(0, len(entered), size or 1))
