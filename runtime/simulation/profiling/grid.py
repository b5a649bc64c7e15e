"""The grid of micro-batches that a profile measures, and the messages that carry them. Imports no torch."""

from __future__ import annotations

from ....conf.sampling import SamplingParams
from ...core.messages import DecodesMessage, MicroBatchMessage, NewRequest, SegmentMessage
from ..cost.profile_point import Point

_GREEDY = SamplingParams(max_tokens=1, ignore_eos=True)
_MAX_DENSE_SIZE = 256  # up to this size, sizes are spaced closely
_MAX_TILES = 16  # in longer chunks, one partial tile costs little
_MIN_TOKENS = 16  # of a chunk with a prefix, a prefix or a context; below it, overhead dominates


def operator_points(max_tokens: int, max_context: int, max_decodes: int, tile: int) -> list[Point]:
    """List the points to which operators are fitted: chunks without decodes, and decodes without a chunk.

    Chunks vary in length and prefix, decodes in number and context. Small sizes are close to each other, since
    libraries switch GEMM kernels there, and time may even fall as rows are added. Each multiple of a tile is followed
    by one row more, which may cost a whole extra tile.
    """
    longest = min(max_tokens, max_context)
    spaced = [n for n in _spaced(8, max_tokens) if n <= longest]
    whole = {n for n in spaced if n % tile == 0} | set(range(tile, 8 * tile + 1, tile) if tile >= 64 else ())
    past = {n + 1 for n in whole if n <= _MAX_TILES * tile}
    points = [Point(chunk=n) for n in sorted({*spaced, *whole, *past}) if n <= longest]
    prefixes = sorted({_MIN_TOKENS, max_context // 8, max_context // 4, max_context // 2, max_context * 3 // 4} - {0})
    for length in spaced:
        if length & (length - 1) == 0 and length >= _MIN_TOKENS:
            points += [Point(chunk=length, prefix=p) for p in prefixes if p + length <= max_context]
    shortest = min(_MIN_TOKENS, max_context)
    contexts = sorted({shortest, max_context // 16, max_context // 4, max_context // 2, max_context})
    for number in _spaced(1, max_decodes):
        is_power = number & (number - 1) == 0
        points += [Point(decodes=number, context=max(c, 2)) for c in (contexts if is_power else contexts[1:2])]
    return points


def mixed_points(max_tokens: int, max_context: int, max_decodes: int) -> list[Point]:
    """List the points that validate a fit: chunks together with decodes, as policies form micro-batches."""
    points = []
    for chunk, quarters in ((max_tokens // 32, 3), (max_tokens // 16, 2), (max_tokens // 8, 1), (max_tokens // 4, 1)):
        for decodes in (max(1, max_decodes // 8), max(1, max_decodes // 4)):
            prefix = min(max_context * quarters // 4, max_context - chunk)
            context = max(2, max_context * (4 - quarters) // 5)
            if chunk >= 1 and prefix >= 0:
                points.append(Point(chunk, prefix, decodes, context, sample=quarters % 2))
    points += [
        Point(chunk=max(1, min(max_tokens, max_context) * 3 // 5)),
        Point(decodes=max(1, max_decodes * 3 // 8), context=max(2, max_context * 3 // 5)),
    ]
    return points


def sent_points(max_tokens: int, max_context: int) -> list[Point]:
    """List the points that measure the time between stages: chunks of a few lengths."""
    return [Point(chunk=n) for n in (1, 16, 64, 256, 1024, 4096) if n <= min(max_tokens, max_context)]


def _spaced(min_size: int, max_size: int) -> list[int]:
    """List `min_size` times each power of two below `max_size`, sizes between those, and `max_size`.

    There are three evenly spaced sizes between neighbours below `_MAX_DENSE_SIZE`, and one above it.
    """
    sizes = {max_size}
    size = min_size
    while size < max_size:
        quarters = (0, 1, 2, 3) if size < _MAX_DENSE_SIZE else (0, 2)
        sizes |= {size + size * quarter // 4 for quarter in quarters}
        size *= 2
    return sorted(size for size in sizes if size <= max_size)


class MessageMaker:
    """Makes the message of each point's micro-batch, with new requests that own consecutive KV blocks."""

    def __init__(self, vocab_size: int, block_size: int) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._num_requests = 0
        self._num_messages = 0
        self._previous_requests: list[int] = []

    def make(self, point: Point, first_block: int = 0) -> MicroBatchMessage:
        """Make the message of `point`. It drops the requests of the previous message.

        `first_block` is the first KV block of the message's requests.
        """
        new: list[NewRequest] = []
        next_block = first_block

        def add_request(num_tokens: int) -> tuple[int, list[int]]:
            nonlocal next_block
            number, num_blocks = self._num_requests, -(-num_tokens // self._block_size)
            self._num_requests += 1
            blocks = list(range(next_block, next_block + num_blocks))
            next_block += num_blocks
            new.append(NewRequest(number, num_tokens, 0, _GREEDY, ()))
            return number, blocks

        chunks = []
        if point.chunk:
            number, blocks = add_request(point.prefix + point.chunk)
            chunks.append(SegmentMessage(number, point.prefix, self._tokens(point.chunk), blocks, bool(point.sample)))
        owned = dict(add_request(point.context) for _ in range(point.decodes))
        decodes = DecodesMessage.of(
            list(owned), [point.context - 1] * point.decodes, self._tokens(point.decodes), owned
        )
        message = MicroBatchMessage(0, self._num_messages, chunks, decodes, new, self._previous_requests)
        self._num_messages += 1
        self._previous_requests = [entry.request for entry in new]
        return message

    def _tokens(self, num_tokens: int) -> list[int]:
        return [(i * 7919 + self._num_messages) % self._vocab_size for i in range(num_tokens)]
