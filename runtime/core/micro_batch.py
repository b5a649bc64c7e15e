"""A micro-batch as a scheduler fills it: chunks of prompts and decodes of requests."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from .request import Request


class Chunk:
    """`length` tokens of a request from `start` on; a chunk that `ends_prefill` samples a token."""

    __slots__ = ("length", "request", "start")

    def __init__(self, request: Request, start: int, length: int) -> None:
        self.request = request
        self.start = start
        self.length = length

    @property
    def ends_prefill(self) -> bool:
        """Whether the chunk is its prompt's last one."""
        return self.start + self.length == self.request.prefill_target


class MicroBatch:
    """The chunks and decodes that a stage runs at once. A request is in it once at most.

    `drafts`, by request: tokens that are guessed to follow its newest one. They are verified in the same pass, each as
    one more row of its decode.
    """

    __slots__ = ("chunks", "decodes", "drafts")

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.decodes: list[Request] = []
        self.drafts: dict[int, list[int]] = {}

    @property
    def num_requests(self) -> int:
        """The number of chunks and decodes, each of another request."""
        return len(self.chunks) + len(self.decodes)

    @property
    def sampled(self) -> list[Request]:
        """The requests that it samples a token for: those of chunks that end their prompt, then the decodes'."""
        ends = [chunk.request for chunk in self.chunks if chunk.ends_prefill]
        return ends + self.decodes if ends else self.decodes

    @property
    def num_prefill_tokens(self) -> int:
        """The tokens of all chunks."""
        return sum([c.length for c in self.chunks])

    @property
    def num_drafts(self) -> int:
        """The draft tokens of all decodes."""
        return sum([len(tokens) for tokens in self.drafts.values()]) if self.drafts else 0

    @property
    def num_tokens(self) -> int:
        """The tokens that the stages compute: of chunks, decodes and drafts."""
        return self.num_prefill_tokens + len(self.decodes) + self.num_drafts

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decodes)
