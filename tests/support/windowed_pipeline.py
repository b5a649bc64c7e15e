"""A virtual pipeline of a model with windows: what a window still reaches must be there, and nothing behind it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gapless.runtime.core.messages import MicroBatchMessage, SegmentMessage
from tests.support.virtual_pipeline import VirtualPipeline


class WindowedPipeline(VirtualPipeline):
    """Ranks with a block table for each group of layers.

    A slot holds the whole text up to its token, so that equal slots mean equal keys. Once all rows of a micro-batch are
    written, each segment must find in each group what its window reaches. Then the blocks behind the window are the
    request's no more: who writes to them in a later micro-batch may do so. Blocks that a chunk names beyond its own
    tokens are the request's from then on.
    """

    def __init__(self, *args: Any, windows: Sequence[int | None], **how: Any) -> None:
        super().__init__(*args, **how)
        self._windows = [10**9 if window is None else window for window in windows]
        self._tables: dict[int, list[list[int]]] = {}
        self._behind: dict[int, list[int]] = {}
        self._texts: dict[int, tuple[int, ...]] = {}  # by slot: the text up to its token
        self._ahead: list[tuple[int, int]] = []  # request and block, named for later micro-batches
        self._starts: dict[int, int] = {}  # by request: the start of its segment in this micro-batch

    def _replay(self, micro_batch: MicroBatchMessage) -> list[int]:
        self._starts.clear()
        tokens = super()._replay(micro_batch)
        for request, start in self._starts.items():
            text, tables = self._tokens[request], self._tables[request]
            for table, window in zip(tables, self._windows, strict=True):
                for position in range(max(0, start - window + 1), len(text)):
                    slot = self._slot_of(table, position)
                    assert self._texts[slot] == tuple(text[: position + 1]), "a key that is not there"
        chunks = {chunk.request: chunk.start + len(chunk.tokens) for chunk in micro_batch.chunks}
        for request in self._starts:  # drafts that were right leave blocks behind too
            known = self._prompt_len[request] + len(self._sampled[request])
            self._leave_behind(request, chunks.get(request, known - 1))
        for request, block in self._ahead:
            self._owners.setdefault(block, set()).add(request)
        self._ahead.clear()
        return tokens

    def _behind_of(self, group: int, num_tokens: int) -> int:
        return max(0, num_tokens - self._windows[group] + 1) // self.block_size

    def _owned(self, request: int, group: int) -> list[int]:
        return self._tables[request][group][self._behind[request][group] :]

    def _leave_behind(self, request: int, num_tokens: int) -> None:
        for group, table in enumerate(self._tables[request]):
            before, behind = self._behind[request][group], self._behind_of(group, num_tokens)
            for block in table[before:behind]:
                self._owners[block].remove(request)
            self._behind[request][group] = max(before, behind)

    def _own(self, segment: SegmentMessage) -> None:
        request = segment.request
        groups = range(len(self._windows))
        tables = self._tables.setdefault(request, [[] for _ in groups])
        behind = self._behind.setdefault(request, [self._behind_of(group, segment.start) for group in groups])
        self._starts[request] = segment.start
        for name in segment.blocks:
            group, block = divmod(name, self.num_blocks)
            if not segment.sample and len(tables[group]) * self.block_size >= segment.start + len(segment.tokens):
                self._ahead.append((request, block))
            elif len(tables[group]) >= behind[group]:
                assert request not in self._owners.get(block, set()), "a block twice"
                self._owners.setdefault(block, set()).add(request)
            tables[group].append(block)

    def _drop(self, request: int) -> None:
        del self._blocks[request]
        for group in range(len(self._windows)):
            for block in self._owned(request, group):
                self._owners[block].remove(request)
        del self._tables[request], self._behind[request]

    def restart(self, fault: Any) -> None:
        super().restart(fault)
        for lost in (self._tables, self._behind, self._texts):
            lost.clear()

    def _past(self, request: int, start: int) -> list[int]:
        return list(self._texts[self._slot_of(self._tables[request][0], start - 1)]) if start else []

    def _slot_of(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, segment: SegmentMessage) -> None:
        have = self._tokens[segment.request]
        have += segment.tokens
        for table in self._tables[segment.request]:
            assert len(have) <= len(table) * self.block_size, "no room in the cache"
            for position in range(segment.start, len(have)):
                slot = self._slot_of(table, position)
                assert self._owners[slot // self.block_size] == {segment.request}, "a write to a block that others read"
                self._texts[slot] = tuple(have[: position + 1])
