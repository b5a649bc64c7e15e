"""A micro-batch as a scheduler fills it: prompt chunks and decodes."""

# Compiled (see runtime/compiled.py).

from __future__ import annotations

from .request import Request


class Chunk:
    """`length` tokens of a request, starting at `start`; a chunk that `ends_prefill` samples a token."""

    __slots__ = ("length", "request", "start")

    def __init__(self, request: Request, start: int, length: int) -> None:
        self.request = request
        self.start = start
        self.length = length

    @property
    def ends_prefill(self) -> bool:
        """Whether this is the prompt's last chunk."""
        return self.start + self.length == self.request.prefill_target


class MicroBatch:
    """The chunks and decodes that a stage runs in one pass. Each request occurs at most once.

    The `draft_tokens` of a request follow its newest token. They are verified in the same pass, each as one more row of
    the decode.
    """

    __slots__ = ("chunks", "decodes", "draft_tokens")

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.decodes: list[Request] = []
        self.draft_tokens: dict[int, list[int]] = {}

    @property
    def num_requests(self) -> int:
        """The number of requests, each with one chunk or one decode."""
        return len(self.chunks) + len(self.decodes)

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token: first the chunks that end their prompt, then the decodes."""
        ends = [chunk.request for chunk in self.chunks if chunk.ends_prefill]
        return ends + self.decodes if ends else self.decodes

    @property
    def num_prefill_tokens(self) -> int:
        """The tokens of all chunks."""
        return sum([c.length for c in self.chunks])

    @property
    def num_draft_tokens(self) -> int:
        """The draft tokens of all decodes."""
        return sum([len(tokens) for tokens in self.draft_tokens.values()]) if self.draft_tokens else 0

    @property
    def num_tokens(self) -> int:
        """The tokens that the stages compute: of chunks, decodes and draft tokens."""
        return self.num_prefill_tokens + len(self.decodes) + self.num_draft_tokens

    def __bool__(self) -> bool:
        return bool(self.chunks or self.decodes)
