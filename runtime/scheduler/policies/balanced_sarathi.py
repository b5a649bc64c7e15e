"""SARATHI with balanced decodes: `scheduler=sarathi scheduler.balance_decodes=true`. It is not in the paper."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from mypy_extensions import mypyc_attr

from ....conf.policies import SarathiConfig
from ...core.block_pool import BlockPool
from ...core.messages import Span
from ...core.micro_batch import MicroBatch
from ...core.run_record import MicroBatchRecord
from ..learned.decode_dealer import DecodeDealer
from ..learned.rival_fits import RivalFits
from ..learned.target_time import TargetTime
from ..limits import Limits
from .sarathi import Sarathi


@mypyc_attr(allow_interpreted_subclasses=True)
class BalancedSarathi(Sarathi):
    """A micro-batch takes its share of all decodes instead of every ready one.

    This keeps decodes from piling up in one micro-batch while others run short. Shares have equal predicted time. While
    there are only decodes, they are distributed over fewer micro-batches if that shortens the time between tokens.
    """

    def __init__(self, config: SarathiConfig, limits: Limits, pool: BlockPool) -> None:
        super().__init__(config, limits, pool)
        most = limits.depth.most
        self.fits = RivalFits(limits.stages, self.limits.tile, most, None)
        self.target = TargetTime(None, self.fits)
        self._dealer = DecodeDealer(most)

    def prepare(self) -> None:
        """Pick the chunk size, and adopt what has been learned about stage times."""
        super().prepare()
        self.target.refresh(self.chunk)

    def fill(self, batch: MicroBatch) -> None:
        """Take a share of the decodes, then a chunk of the next prompt."""
        super().fill(batch)
        if not batch:
            super().take_decodes(batch, 1)  # no decode of this micro-batch's share is ready

    def take_decodes(self, batch: MicroBatch, most: int) -> None:
        """Dispatch this micro-batch's share of the ready decodes, `most` at most."""
        target = self.target
        self._dealer.survey(self._turn, self.running.values(), target.cost, target.stages, self.fits.step)
        num_decodes = len(self.running) - len(self.prefilling)
        seconds = target.seconds(self.chunk) if self.prefilling else None
        super().take_decodes(batch, self._dealer.share(self.ready, self.depth, num_decodes, most, seconds))

    @property
    def depth(self) -> int:
        """Micro-batches in flight: the maximum, or with decodes only the number that minimizes the TBT."""
        return self.limits.depth.most if self.backlog else self._dealer.groups

    def predict(self, micro_batch: MicroBatchRecord) -> list[float] | None:
        """See `Scheduler.predict`."""
        return self.fits.predict(micro_batch)

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Learn which chunk size to pick, and the stage times."""
        super().observe(micro_batch, spans)
        self.fits.observe(micro_batch, spans)

    @property
    def stage_weights(self) -> list[list[float]] | None:
        """See `Scheduler.stage_weights`."""
        return self.fits.by_stage
