"""Token masks of structured outputs, computed in a thread that overlaps with the stages' computation.

A micro-batch's message contains the tokens sampled before it. So a request's matcher advances and computes its next
mask as soon as the message arrives; the mask is needed only once the last stage has its logits. After a preemption, a
request's chunks contain its output tokens, and a new matcher consumes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..conf.reasoning import Reasoning
from ..conf.structured_outputs import StructuredOutputs
from .grammar import Grammars
from .mask_progress import MaskProgress
from .transfers import upload

if TYPE_CHECKING:
    import llguidance


class RowMasks:
    """Token masks for some rows of a micro-batch's logits.

    Args:
        rows: ascending.
        is_masked: 1 for each masked token, [S, W] uint8. W is a multiple of 8 and at least V.
    """

    def __init__(self, rows: list[int], is_masked: np.ndarray) -> None:
        self.rows = rows
        self._is_masked = is_masked
        self._places = {row: place for place, row in enumerate(rows)}

    def allowed(self, row: int, vocab_size: int) -> np.ndarray | None:
        """Return the allowed tokens of a row, [V] bool; None if all are allowed."""
        place = self._places.get(row)
        return None if place is None else self._is_masked[place, :vocab_size] == 0

    def apply(self, logits_RV: Tensor) -> Tensor:
        """Return the logits with masked tokens set to -infinity."""
        V, S = logits_RV.shape[1], len(self.rows)
        if S == 0:
            return logits_RV
        packed = self._is_masked.reshape(-1).view(np.int64)
        packed_mask, rows_S = upload([packed, np.array(self.rows, dtype=np.int64)], logits_RV.device)
        is_masked_SV = packed_mask.view(torch.bool).view(S, -1)[:, :V]
        masked_SV = logits_RV[rows_S].masked_fill_(is_masked_SV, float("-inf"))
        return masked_SV if len(logits_RV) == S else logits_RV.index_copy(0, rows_S, masked_SV)


_New = tuple[int, StructuredOutputs | None, Reasoning | None, int]


class TokenMasks:
    """The matchers of requests with structured outputs or a reasoning budget, on each rank of the last stage.

    Micro-batches must be passed in order, from one thread.

    Args:
        load: creates the grammar compiler, when the first such request arrives.
        threads: number of threads that compute masks.
    """

    def __init__(self, load: Callable[[], Grammars], threads: int) -> None:
        self._load = load
        self._num_threads = threads
        self._grammars: Grammars | None = None
        self._executor: llguidance.LLExecutor | None = None
        self._progress: dict[int, MaskProgress] = {}  # accessed only by the thread
        self._thread = ThreadPoolExecutor(1, "masks")
        self._failure: Exception | None = None
        self._known: set[int] = set()
        self._new: list[_New] = []

    @property
    def is_empty(self) -> bool:
        """Whether no request has structured outputs or a reasoning budget."""
        return not self._known

    def drop(self, request: int) -> None:
        """Remove a request, if it exists."""
        if request in self._known:
            self._known.discard(request)
            self._thread.submit(self._progress.pop, request, None)

    def add(
        self, request: int, wanted: StructuredOutputs | None, prompt_len: int, reasoning: Reasoning | None = None
    ) -> None:
        """Add a new request. Its first tokens must be in the next `advance`."""
        self._known.add(request)
        self._new.append((request, wanted, reasoning, prompt_len))

    def advance(
        self, segments: Iterable[tuple[int, int, Sequence[int]]], sampled: Sequence[int]
    ) -> Future[RowMasks] | None:
        """Consume the tokens of a micro-batch, and compute the masks of the tokens that it samples.

        Args:
            segments: request, position of the first token, and tokens.
            sampled: the request of each row of logits.

        Returns:
            A future of the masks, or of the error in this or an earlier micro-batch; None if no row needs a mask.
        """
        own = [segment for segment in segments if segment[0] in self._known]
        rows = [(row, request) for row, request in enumerate(sampled) if request in self._known]
        if not own:
            return None
        new, self._new = self._new, []
        masks = self._thread.submit(self._advance, new, own, rows)
        return masks if rows else None

    def _advance(
        self, new: list[_New], segments: list[tuple[int, int, Sequence[int]]], rows: list[tuple[int, int]]
    ) -> RowMasks:
        if self._failure is not None:
            raise self._failure
        try:
            if self._grammars is None:
                self._grammars = self._load()
            for request, wanted, reasoning, prompt_len in new:
                self._progress[request] = MaskProgress(self._grammars, wanted, reasoning, prompt_len)
            for request, start, tokens in segments:
                self._progress[request].feed(start, tokens)
            return self._masks(self._grammars, rows)
        except Exception as error:
            self._failure = error
            raise

    def _masks(self, grammars: Grammars, rows: list[tuple[int, int]]) -> RowMasks:
        found = [(row, self._progress[request]) for row, request in rows]
        forced = [(row, token) for row, progress in found if (token := progress.forced) is not None]
        matched = [(row, each.matcher) for row, each in found if each.is_matching and each.matcher is not None]
        width = -(-grammars.vocab_size // 32)
        words = np.zeros((len(matched) + len(forced), width), dtype=np.int32)
        self._fill([matcher for _, matcher in matched], words, width)
        for place, (_, matcher) in enumerate(matched):
            if matcher.is_error():  # it reached a limit; llguidance would allow the output to end
                words[place] = 0
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        for place, (_, token) in enumerate(forced, len(matched)):
            bits[place, token] = 1
        np.bitwise_xor(bits, 1, out=bits)
        numbers = [row for row, _ in (*matched, *forced)]
        order = np.argsort(numbers) if forced else np.arange(len(numbers))
        return RowMasks([numbers[place] for place in order], bits[order] if forced else bits)

    def _fill(self, matchers: list[llguidance.LLMatcher], words: np.ndarray, width: int) -> None:
        if len(matchers) <= 1:
            for matcher in matchers:
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, width * 4)
            return
        if self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor(self._num_threads)
        places = [(matcher, place) for place, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(places, words.ctypes.data, width * 4, len(matchers))
