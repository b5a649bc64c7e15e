"""A micro-batch as a scheduler fills it: chunks of prompts and decodes of requests."""

from __future__ import annotations

import msgspec

from .request import Request


class Chunk(msgspec.Struct, frozen=True):
    """`length` tokens of a request from `start` on; `ends_prefill` chunks sample a token."""

    request: Request
    start: int
    length: int

    @property
    def ends_prefill(self) -> bool:
        return self.start + self.length == self.request.prefill_target


class MicroBatch(msgspec.Struct):
    """What the stages run at once. A request stands in it once at most."""

    chunks: list[Chunk] = []
    decodes: list[Request] = []

    @property
    def num_prefill_tokens(self) -> int:
        return sum([c.length for c in self.chunks])

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + len(self.decodes)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decodes)
