"""A pipeline on a virtual clock whose stages only take time, and which audits every step that it is given."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from gapless.runtime.core.messages import (
    UNSEEN_TOKEN,
    MicroBatchMessage,
    MicroBatchResult,
    Sampled,
    SegmentMessage,
    Span,
)
from gapless.runtime.core.run_record import FaultRecord
from gapless.runtime.core.stage_floor import StageMachine
from gapless.runtime.pipeline.protocol import PipelineFault

StageTime = Callable[[MicroBatchMessage, int], float]


class VirtualPipeline:
    """Stages in a row, each FIFO. A rank's part is played by tables replayed from the micro-batches alone.

    It fails on what a real rank could not survive: a write to a block that two requests own, a token computed out of
    order or twice, a decode whose token was never sampled, more micro-batches in flight than the depth. A prefix that
    no chunk brings is read from the blocks, whatever they hold. With `repeats` a
    token depends on the three before it alone, so that outputs come round again and drafts are accepted now and then.

    `faults` are times at which the pipeline loses all that it holds. A repair takes `REPAIR_S`, and may meet the next
    fault. With `loses_stages` there is a stage less after each, down to one.
    """

    REPAIR_S = 0.3

    def __init__(
        self,
        num_stages: int,
        depth: int,
        num_blocks: int,
        block_size: int,
        stage_time: StageTime,
        repeats: bool = False,
        faults: Sequence[float] = (),
        loses_stages: bool = False,
        looks_ahead: bool = False,
    ) -> None:
        self.now_s = 0.0
        self.clock = self
        self.num_stages = num_stages
        self.depth = depth
        self.looks_ahead = looks_ahead
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.where = ["virtual"] * num_stages
        self.machines = [StageMachine()] * num_stages
        self.micro_batches: list[MicroBatchMessage] = []
        self.max_outstanding = 0
        self._stage_time = stage_time
        self._repeats = repeats
        self._free_at = [0.0] * num_stages
        self._results: list[tuple[float, int, MicroBatchResult]] = []
        self._outstanding = 0
        self._faults = deque(sorted(faults))
        self._loses_stages = loses_stages
        self._repair: FaultRecord | None = None
        self.epoch = 0
        self._undelivered: dict[int, list[int]] = {}  # by micro-batch: requests that it sampled a token for
        self._owners: dict[int, set[int]] = {}
        self._slots: dict[int, int] = {}  # token whose KV a slot holds
        self._blocks: dict[int, list[int]] = {}
        self._tokens: dict[int, list[int]] = {}  # by request: tokens whose KV is computed
        self._sampled: dict[int, list[int]] = {}  # by request: every token ever sampled, at its position
        self._prompt_len: dict[int, int] = {}

    def now(self) -> float:
        return self.now_s

    def submit(self, micro_batch: MicroBatchMessage) -> None:
        assert self._repair is None, "nothing is dispatched to a pipeline that does not stand"
        assert micro_batch.epoch == self.epoch
        self._outstanding += 1
        self.max_outstanding = max(self.max_outstanding, self._outstanding)
        assert self._outstanding <= self.depth + self.looks_ahead
        assert micro_batch.micro_batch == len(self.micro_batches)
        self.micro_batches.append(micro_batch)
        tokens = self.take(micro_batch)
        at = self.now_s
        for stage in range(self.num_stages):
            begin = max(at, self._free_at[stage])
            end = begin + self._stage_time(micro_batch, stage)
            span = Span(micro_batch.micro_batch, stage, self._free_at[stage], at, begin, end, end)
            self._free_at[stage] = at = end
            last = stage == self.num_stages - 1
            result = MicroBatchResult(
                micro_batch.epoch, micro_batch.micro_batch, [span], Sampled(tokens) if last else None
            )
            heapq.heappush(self._results, (end, micro_batch.micro_batch * self.num_stages + stage, result))

    def wait(self, deadline: float) -> list[MicroBatchResult]:
        event = self._results[0][0] if self._results else deadline
        if self._repair is not None:
            event = self._repair.detected + self.REPAIR_S
        if self._faults and self._faults[0] <= max(self.now_s, event):
            self.now_s = max(self.now_s, self._faults.popleft())
            raise PipelineFault("a virtual fault", "process", self.now_s)
        if self._repair is not None:
            self.now_s = self._repair.up = max(self.now_s, event)
            self._repair.parts = {"start": self.REPAIR_S}
            self._repair.stages = self.num_stages if self._loses_stages else None
            self._repair = None
            return []
        if not self._results:
            self.now_s = max(self.now_s, deadline)
            return []
        end, _, result = heapq.heappop(self._results)
        self.now_s = max(self.now_s, end)
        if result.sampled is not None:
            self._outstanding -= 1
            self.delivered(result.micro_batch)
        return [result]

    def restart(self, fault: FaultRecord) -> None:
        assert fault.epoch == self.epoch + 1
        self.epoch, self._repair, self._outstanding = fault.epoch, fault, 0
        if self._loses_stages:
            self.num_stages = max(1, self.num_stages - 1)
        self._free_at = [self.now_s] * self.num_stages
        for lost in (self._results, self._owners, self._slots, self._blocks, self._tokens):
            lost.clear()
        for requests in self._undelivered.values():
            for request in requests:
                self._sampled[request].pop()
        self._undelivered.clear()

    def take(self, micro_batch: MicroBatchMessage) -> list[int]:
        """Replay a micro-batch, and note for which requests it samples until its result is delivered."""
        before = {request: len(tokens) for request, tokens in self._sampled.items()}
        tokens = self._replay(micro_batch)
        self._undelivered[micro_batch.micro_batch] = [
            request for request, sampled in self._sampled.items() for _ in range(len(sampled) - before.get(request, 0))
        ]
        return tokens

    def delivered(self, micro_batch: int) -> None:
        del self._undelivered[micro_batch]

    def sampled(self, request: int) -> list[int]:
        """All tokens that were sampled for a request, wrong drafts' ones apart."""
        return self._sampled.get(request, [])

    def close(self) -> None:
        pass

    def _replay(self, micro_batch: MicroBatchMessage) -> list[int]:
        for request in micro_batch.dropped:
            self._drop(request)
            del self._tokens[request]
        for new in micro_batch.new:
            assert new.request not in self._blocks, "told twice"
            self._blocks[new.request] = []
            self._tokens[new.request] = []
            self._prompt_len[new.request] = new.prompt_len
            self._sampled.setdefault(new.request, [])
        before = self._undelivered.get(micro_batch.micro_batch - 1, [])
        segments = [*micro_batch.chunks, *(self._seen(decode, before) for decode in micro_batch.decodes)]
        assert segments, "an empty micro-batch"
        is_draft = [s.request == before.request for before, s in pairwise([segments[-1], *segments])]
        is_draft[0] = False
        assert sum(is_draft) == micro_batch.decodes.drafts
        firsts = [s.request for s, is_more in zip(segments, is_draft, strict=True) if not is_more]
        assert len(set(firsts)) == len(firsts), "a request twice in one micro-batch"
        assert all(len(d.tokens) == 1 and d.sample for d in micro_batch.decodes)
        return [
            self._compute(s)
            for s, is_more in zip(segments, is_draft, strict=True)
            if (self._place_draft(s) if is_more else self._place(s))
        ]

    def _seen(self, decode: SegmentMessage, before: Sequence[int]) -> SegmentMessage:
        """Return a decode with its token, where it stands for what the micro-batch `before` sampled for the request."""
        if decode.tokens != [UNSEEN_TOKEN]:
            return decode
        assert self.looks_ahead
        assert decode.request in before, "a token that another micro-batch samples"
        newest = self._sampled[decode.request][-1]
        return SegmentMessage(decode.request, decode.start, [newest], decode.blocks, decode.sample)

    def _place(self, segment: SegmentMessage) -> bool:
        """Write a segment to the tables; draft tokens of the request's last decode that were wrong are overwritten."""
        request = segment.request
        self._own(segment)
        have = self._tokens[request]
        if not have:
            assert segment.start % self.block_size == 0, "only whole blocks are shared"
            have += self._past(request, segment.start)
        if segment.start < len(have):
            known = self._prompt_len[request] + len(self._sampled[request])
            assert segment.start == known - 1, "a token twice"
            del have[segment.start :]
        assert segment.start == len(have), "a gap"
        self._write(segment)
        outputs = have[self._prompt_len[request] :]
        assert outputs == self._sampled[request][: len(outputs)], "an output changed"
        return segment.sample

    def _own(self, segment: SegmentMessage) -> None:
        """Note the blocks that a request has got."""
        for block in segment.blocks:
            assert 0 <= block < self.num_blocks
            self._owners.setdefault(block, set()).add(segment.request)
        own = self._blocks[segment.request]
        own += segment.blocks
        assert len(set(own)) == len(own), "a block twice"

    def _drop(self, request: int) -> None:
        for block in self._blocks.pop(request):
            self._owners[block].remove(request)

    def _past(self, request: int, start: int) -> list[int]:
        """Read the first `start` tokens of a request from its blocks."""
        return [self._slots[self._slot(request, position)] for position in range(start)]

    def _place_draft(self, segment: SegmentMessage) -> bool:
        have = self._tokens[segment.request]
        assert not segment.blocks, "the blocks of a request's rows come with the first"
        assert segment.start == len(have), "a gap between the rows of a request"
        self._write(segment)
        return segment.sample

    def _slot(self, request: int, position: int) -> int:
        return self._blocks[request][position // self.block_size] * self.block_size + position % self.block_size

    def _write(self, segment: SegmentMessage) -> None:
        request, have = segment.request, self._tokens[segment.request]
        have += segment.tokens
        assert len(have) <= len(self._blocks[request]) * self.block_size, "no room in the cache"
        for position, token in enumerate(segment.tokens, segment.start):
            slot = self._slot(request, position)
            assert self._owners[slot // self.block_size] == {request}, "a write to a block that others read"
            self._slots[slot] = token

    def _compute(self, segment: SegmentMessage) -> int:
        """Return a token that depends on all tokens before it, as a model's does."""
        have = self._tokens[segment.request]
        seen = have[-3:] if self._repeats else [len(have), *have]
        token = random.Random(f"{segment.request} {seen}").randrange(10 if self._repeats else 1000)
        at = len(have) - self._prompt_len[segment.request]
        sampled = self._sampled[segment.request]
        if have[self._prompt_len[segment.request] :] != sampled[:at]:
            return token  # of a past that a wrong draft made up
        assert at == len(sampled), "a token sampled twice, or never"
        sampled.append(token)
        return token
