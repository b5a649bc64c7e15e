"""Prefix block ids of a trace's prompts, if the trace has them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

_SHARED_STREAM, _OWN_STREAM = 3, 4  # random streams, in addition to those of `workload.py`


@dataclass(frozen=True, slots=True)
class PrefixIds:
    """Ids of a prompt's blocks of `block_size` tokens each. A partial last block may have one.

    Prompts with the same id at the same position are equal up to the end of that block.
    """

    ids: list[int]
    block_size: int

    def block_hashes(self, num_tokens: int, block_size: int) -> list[bytes]:
        """Return the hashes of the full KV blocks of `block_size` tokens in the prompt's first `num_tokens` tokens.

        A KV block that spans two of the trace's blocks is shared if both are.
        """
        ids, own = self.ids, self.block_size
        ends = range(block_size, min(num_tokens, len(ids) * own) + 1, block_size)
        return [struct.pack("<qq", ids[(end - 1) // own], end) for end in ends]

    def tokens(self, num_tokens: int, vocab_size: int, seed: int, request: int) -> list[int]:
        """Return random token ids for the prompt's first `num_tokens` tokens, equal for equal ids.

        Tokens of a partial block without an id depend on the request's number.
        """
        size = self.block_size
        parts = [
            np.random.default_rng((seed, _SHARED_STREAM, number, place)).integers(vocab_size, size=size)
            for place, number in enumerate(self.ids[: -(-num_tokens // size)])
        ]
        own = np.random.default_rng((seed, _OWN_STREAM, request)).integers(vocab_size, size=size)
        ids: list[int] = np.concatenate([*parts, own])[:num_tokens].tolist()
        return ids
