"""The micro-batches that a profile measures. No torch."""

from __future__ import annotations

from ...conf.sampling import SamplingParams
from ..core.messages import DecodesMessage, MicroBatchMessage, NewRequest, SegmentMessage
from ..cost.profile_point import Point

_GREEDY = SamplingParams(max_tokens=1, ignore_eos=True)
_DENSE = 256  # up to here lengths are spaced closely
_TILES = 16  # beyond so many of them the last one, cut, weighs little
_LEAST = 16  # tokens of a chunk or a context: below it all is overhead, which decodes show


def operator_points(max_tokens: int, max_context: int, max_decodes: int, tile: int) -> list[Point]:
    """Chunks alone over lengths and prefixes, decodes alone over numbers and contexts: what operators are fitted to.

    Small sizes stand close to each other: kernels of matrix products change there, and time may fall as rows are
    added. One row past a whole tile stands beside it, since it may cost as much as a tile.
    """
    longest = min(max_tokens, max_context)
    spaced = [n for n in _spaced(8, max_tokens) if n <= longest]
    whole = {n for n in spaced if n % tile == 0} | set(range(tile, 8 * tile + 1, tile) if tile >= 64 else ())
    past = {n + 1 for n in whole if n <= _TILES * tile}
    points = [Point(chunk=n) for n in sorted({*spaced, *whole, *past}) if n <= longest]
    prefixes = sorted({_LEAST, max_context // 8, max_context // 4, max_context // 2, max_context * 3 // 4} - {0})
    for length in spaced:
        if length & (length - 1) == 0 and length >= _LEAST:
            points += [Point(chunk=length, prefix=p) for p in prefixes if p + length <= max_context]
    contexts = sorted({min(_LEAST, max_context), max_context // 16, max_context // 4, max_context // 2, max_context})
    for number in _spaced(1, max_decodes):
        is_power = number & (number - 1) == 0
        points += [Point(decodes=number, context=max(c, 2)) for c in (contexts if is_power else contexts[1:2])]
    return points


def mixed_points(max_tokens: int, max_context: int, max_decodes: int) -> list[Point]:
    """Micro-batches as policies form them, chunks with decodes: what a fit is judged by."""
    points = []
    for chunk, part in ((max_tokens // 32, 3), (max_tokens // 16, 2), (max_tokens // 8, 1), (max_tokens // 4, 1)):
        for decodes in (max(1, max_decodes // 8), max(1, max_decodes // 4)):
            prefix = min(max_context * part // 4, max_context - chunk)
            context = max(2, max_context * (4 - part) // 5)
            if chunk >= 1 and prefix >= 0:
                points.append(Point(chunk, prefix, decodes, context, sample=part % 2))
    points += [Point(chunk=max(1, min(max_tokens, max_context) * 3 // 5)), Point(decodes=max(1, max_decodes * 3 // 8),
               context=max(2, max_context * 3 // 5))]  # fmt: skip
    return points


def sent_points(max_tokens: int, max_context: int) -> list[Point]:
    """Chunks of a few lengths: what the time between stages is measured with."""
    return [Point(chunk=n) for n in (1, 16, 64, 256, 1024, 4096) if n <= min(max_tokens, max_context)]


def _spaced(least: int, most: int) -> list[int]:
    """Powers of two from `least` on, what lies a quarter, a half and three quarters between them (above `_DENSE` the
    half alone), and `most`."""
    sizes = {most}
    size = least
    while size < most:
        quarters = (0, 1, 2, 3) if size < _DENSE else (0, 2)
        sizes |= {size + size * quarter // 4 for quarter in quarters}
        size *= 2
    return sorted(size for size in sizes if size <= most)


class MessageMaker:
    """Micro-batches that carry points: each with requests of its own, whose KV lies in blocks that follow each
    other."""

    def __init__(self, vocab_size: int, block_size: int) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._requests = 0
        self._micro_batches = 0
        self._old: list[int] = []

    def make(self, point: Point, first_block: int = 0) -> MicroBatchMessage:
        """The point's micro-batch; requests of the micro-batch before are dropped. `first_block`: of its requests'
        blocks."""
        new: list[NewRequest] = []
        free = first_block

        def request(tokens: int) -> tuple[int, list[int]]:
            nonlocal free
            number, count = self._requests, -(-tokens // self._block_size)
            self._requests += 1
            blocks = list(range(free, free + count))
            free += count
            new.append(NewRequest(number, tokens, 0, _GREEDY, ()))
            return number, blocks

        chunks = []
        if point.chunk:
            number, blocks = request(point.prefix + point.chunk)
            chunks.append(SegmentMessage(number, point.prefix, self._tokens(point.chunk), blocks, bool(point.sample)))
        owned = dict(request(point.context) for _ in range(point.decodes))
        decodes = DecodesMessage.of(
            list(owned), [point.context - 1] * point.decodes, self._tokens(point.decodes), owned
        )
        micro_batch = MicroBatchMessage(0, self._micro_batches, chunks, decodes, new, self._old)
        self._micro_batches += 1
        self._old = [entry.request for entry in new]
        return micro_batch

    def _tokens(self, count: int) -> list[int]:
        return [(i * 7919 + self._micro_batches) % self._vocab_size for i in range(count)]
