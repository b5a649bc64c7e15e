"""How far chunks grow while prompts pile up."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from ...core.queue_snapshot import QueueSnapshot

_STEP = 0.5  # growth per step, as a share of the chunk
_STEP_INTERVAL = 16  # micro-batches between two steps
_MOST_OF_A_PROMPT = 0.5  # share of the chunks of `iterations` that a single prompt counts for, however long
_FULL = 0.25  # slots or blocks are full if fewer than this share of the running requests could be added
_ROOMY = 0.5  # least free share at which they count as free again


class ChunkGrowth:
    """Sets the chunk size from the number of waiting prompt tokens.

    Larger chunks prefill faster but delay decodes. So chunks grow when more prompt tokens wait than `iterations`
    micro-batches take, as in token throttling (gLLM, arXiv 2504.14775), and never fall below the base chunk size. They
    grow in slow steps: a burst is over before it delays decodes much, a sustained overload is not. They shrink at once.

    If slots or blocks are full, prompts wait for requests to finish. Larger chunks would then only leave more
    micro-batches without a chunk.

    Args:
        iterations: micro-batches over which waiting prompt tokens are spread.
        most: maximum tokens of a grown chunk.
        tile: rows that GEMMs pad to.
    """

    def __init__(self, iterations: int, most: int, tile: int) -> None:
        self._iterations = iterations
        self._most = most
        self._tile = tile
        self._size = 0
        self._next_step = _STEP_INTERVAL  # number of the first micro-batch that may grow again
        self._is_full = False

    def grown(self, number: int, chunk: int, queues: QueueSnapshot, decodes: float) -> int:
        """Return the tokens of a micro-batch, chunk and decodes together.

        Args:
            number: number of the micro-batch.
            chunk: chunk size in tokens while prompts do not pile up.
            queues: current queue statistics.
            decodes: mean number of piggybacked decodes.
        """
        wanted = max(chunk, min(self._wanted(chunk, queues, decodes), self._most))
        if wanted <= self._size:
            self._size = wanted
        elif self._size < chunk:
            self._size = chunk
        elif number >= self._next_step:
            step = max(1, round(_STEP * chunk / self._tile)) * self._tile
            self._size = min(wanted, self._size + step)
            self._next_step = number + _STEP_INTERVAL
        return self._size

    def _wanted(self, chunk: int, queues: QueueSnapshot, decodes: float) -> int:
        """Return the tokens per micro-batch that dispatch the waiting prompts within `iterations` micro-batches."""
        self._is_full = queues.num_admissible < (_ROOMY if self._is_full else _FULL) * queues.num_running
        prompts = queues.num_waiting + queues.num_prefilling
        if not prompts or self._is_full:
            return 0
        tokens = queues.backlog * min(1.0, (queues.num_prefilling + queues.num_admissible) / prompts)
        tokens = min(tokens, _MOST_OF_A_PROMPT * prompts * self._iterations * chunk)
        return round((tokens / self._iterations + decodes) / self._tile) * self._tile
