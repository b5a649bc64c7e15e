"""Two fits of the stage times, by tokens and by whole tiles, and the choice between them."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from collections.abc import Sequence

from ...core.features import Features, features
from ...core.messages import Span
from ...core.run_record import MicroBatchRecord
from .stage_fit import StageFit

_WATCHED_ROUNDS = 2  # the unused fit learns from one in this many pipeline rounds
_CLEAR_ADVANTAGE = 1.25  # ratio of errors at which one fit is clearly better


class RivalRows:
    """The features of one micro-batch for both fits: tokens as they are, and rounded up to whole tiles."""

    def __init__(self, micro_batch: MicroBatchRecord, tile: int) -> None:
        row = features(micro_batch)
        self.by_tokens = row
        self.by_tiles = Features(1.0, -(-row[1] // tile) * tile, row[2], row[3], row[4], row[5])


class RivalFits:
    """Predicts stage times with whichever fit has had clearly smaller errors on later observations.

    Time grows smoothly with tokens if tiles are small compared with a chunk, and in steps of a tile if they are large
    (paper 4.4). Both fits are `StageFit`; with a tile of 1 there is only one.

    Args:
        depth: micro-batches in a round of the pipeline.
    """

    def __init__(self, num_stages: int, tile: int, depth: int) -> None:
        self._num_stages = num_stages
        self._tile = tile
        self._depth = depth
        self._by_tokens = StageFit(num_stages)
        self._by_tiles = StageFit(num_stages) if tile > 1 else None
        self._rows: dict[int, RivalRows] = {}  # of the micro-batches in flight, by number
        self.best = self._by_tokens

    @property
    def is_fitted(self) -> bool:
        """Whether the better fit has seen enough to predict."""
        return self.best.is_fitted

    @property
    def step(self) -> int:
        """Granularity of the fit in use, in tokens: the tile, or 1."""
        return self._tile if self.best is self._by_tiles else 1

    @property
    def by_stage(self) -> list[list[float]] | None:
        """Weights of `Features` by stage, None before the first fit."""
        return self.best.by_stage

    def predict(self, micro_batch: MicroBatchRecord) -> list[float] | None:
        """Return the seconds that each stage will take, None before the first fit."""
        rows = self._rows[micro_batch.micro_batch] = RivalRows(micro_batch, self._tile)
        return self.best.predict(rows.by_tiles if self.best is self._by_tiles else rows.by_tokens)

    def observe(self, micro_batch: MicroBatchRecord, spans: Sequence[Span]) -> None:
        """Learn from the spans of one or several stages that have computed a micro-batch.

        The unused fit learns from whole rounds, because each micro-batch in flight has different decodes.
        """
        number = micro_batch.micro_batch
        rows = self._rows.get(number) or RivalRows(micro_batch, self._tile)
        stages, seconds = [span.stage for span in spans], [span.end - span.begin for span in spans]
        is_watched = number // self._depth % _WATCHED_ROUNDS == 0
        in_tiles = self.best is self._by_tiles
        if is_watched or not in_tiles:
            self._by_tokens.observe(rows.by_tokens, stages, seconds)
        if self._by_tiles is not None and (is_watched or in_tiles or not self._by_tiles.is_fitted):
            self._by_tiles.observe(rows.by_tiles, stages, seconds)
        if spans[-1].stage == self._num_stages - 1:
            self._rows.pop(number, None)

    def choose(self) -> None:
        """Switch to the other fit if its errors are clearly smaller."""
        if self._by_tiles is None or not self._by_tiles.is_fitted:
            return
        in_use = self.best is self._by_tiles
        bound = _CLEAR_ADVANTAGE if in_use else 1 / _CLEAR_ADVANTAGE
        self.best = self._by_tiles if self._by_tiles.noise < bound * self._by_tokens.noise else self._by_tokens
