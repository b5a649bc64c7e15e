"""How far chunks grow while prompts pile up."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from ...core.queue_snapshot import QueueSnapshot

_STEP = 0.5  # of the chunk, by which it grows at a time
_STEP_INTERVAL = 16  # micro-batches between two steps
_MOST_OF_A_PROMPT = 0.5  # share of the iterations' chunks that a single prompt counts for, however long it is
_FULL = 0.25  # slots or blocks are full if fewer than this share of the running requests could be added
_ROOMY = 0.5  # share from which on they are full no more


class ChunkGrowth:
    """Says how large a chunk is, from the prompt tokens that wait.

    Larger chunks prefill faster, and decodes come round later. So chunks grow where more prompt tokens wait than
    `iterations` micro-batches take, as token throttling has it (gLLM, arXiv 2504.14775), and never below the chunk that
    they have otherwise. They grow in slow steps: a burst is over before decodes notice much of it, a load beyond what
    the chunk carries is not. They shrink at once.

    Where slots or blocks are full, prompts wait for requests to end. Larger chunks would then only leave more
    micro-batches without any.

    Args:
        iterations: micro-batches over which waiting prompt tokens are spread.
        most: tokens of a chunk that has grown.
        tile: rows that matrix products pad to.
    """

    def __init__(self, iterations: int, most: int, tile: int) -> None:
        self._iterations = iterations
        self._most = most
        self._tile = tile
        self._size = 0
        self._next_step = _STEP_INTERVAL  # number of the micro-batch from which on it may grow again
        self._is_full = False

    def grown(self, number: int, chunk: int, queues: QueueSnapshot, decodes: float) -> int:
        """Return the tokens of a micro-batch's chunk and decodes.

        Args:
            number: of the micro-batch.
            chunk: the same while prompts do not pile up.
            queues: at this time.
            decodes: that ride along, on average.
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
        """Return the tokens with which the prompts that wait are dispatched within the iterations."""
        self._is_full = queues.num_admissible < (_ROOMY if self._is_full else _FULL) * queues.num_running
        prompts = queues.num_waiting + queues.num_prefilling
        if not prompts or self._is_full:
            return 0
        tokens = queues.backlog * min(1.0, (queues.num_prefilling + queues.num_admissible) / prompts)
        tokens = min(tokens, _MOST_OF_A_PROMPT * prompts * self._iterations * chunk)
        return round((tokens / self._iterations + decodes) / self._tile) * self._tile
