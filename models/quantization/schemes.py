"""How checkpoints store a quantized weight: the tensors of a linear layer, and the matrix that they come to.

Weights are [out, in] here, whatever the tensors' own order. A slice is unpacked by a few operations on whole tensors.
This file imports no torch until it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ...parallel.weight_format import WeightFormat
from ..checkpoint import FLOATS, Part

if TYPE_CHECKING:
    import torch

    from ...parallel.quantized_matrix import QuantizedMatrix

_WORDS = ("I32",)
_WORD_BITS = 32
# The nibble of each of the 8 outputs in a word of AWQ's gemm layout, which AutoAWQ packs in the order 0 2 4 6 1 3 5 7.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


class Parts(Protocol):
    """The tensors of one linear layer, by their names within it."""

    shape: tuple[int, int]  # of the weight, [out, in]

    @property
    def is_ordered(self) -> bool:
        """What `Scheme.is_ordered` returns of them."""
        ...

    def has(self, name: str) -> bool:
        """Return whether there is such a tensor."""
        ...

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Read a slice of a tensor, or all of it. One that is no matrix has neither rows nor columns."""
        ...


class Scheme(Protocol):
    """A way to store a quantized weight."""

    def parts(self, out_size: int, in_size: int) -> dict[str, Part]:
        """Return the tensors that hold a weight, by their names within the linear layer."""
        ...

    def format(self, in_size: int) -> WeightFormat:
        """Return the format in which the weight is held without loss."""
        ...

    def read(self, parts: Parts, rows: slice, columns: slice) -> QuantizedMatrix:
        """Read a slice of the weight. The columns begin and end at multiples of 16, or are all."""
        ...

    def wrong(self, parts: Parts) -> str | None:
        """Return what is wrong with the contents of the tensors, beginning with a tensor's name; None: nothing."""
        ...

    def is_ordered(self, parts: Parts) -> bool:
        """Return whether columns have their groups in an order of their own (`desc_act`), and so cannot be cut."""
        ...


class _Plain:
    """What most schemes have: nothing to check, and groups of neighbours."""

    def wrong(self, parts: Parts) -> str | None:
        """See `Scheme.wrong`."""
        return None

    def is_ordered(self, parts: Parts) -> bool:
        """See `Scheme.is_ordered`."""
        return False


def cover(part: slice, size: int) -> tuple[slice, slice]:
    """Return the units of `size` that a slice touches, and the slice within them."""
    first = part.start // size
    return slice(first, -(-part.stop // size)), slice(part.start - first * size, part.stop - first * size)


def _num_words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD_BITS)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """Return the bytes of words [..., n], [..., 4 * n]."""
    import torch

    return words.contiguous().view(torch.uint8)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of words [..., n], the lowest bits first, [..., n * 32 / bits]."""
    from .matrices import nibbles

    return nibbles(_bytes(words)) if bits == 4 else _bytes(words)


def _sliced(
    codes: torch.Tensor,
    format: WeightFormat,
    group: int,
    columns: slice,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
) -> QuantizedMatrix:
    """Return the matrix of codes, with the scales and zeros [rows, groups] of the groups that the columns touch."""
    from dataclasses import replace

    from ...parallel.quantized_matrix import QuantizedMatrix
    from .matrices import cut_groups

    scales, smaller = cut_groups(scales.float(), group, columns)
    offsets = None if zeros is None else -scales * cut_groups(zeros.float(), group, columns)[0]
    return QuantizedMatrix(replace(format, group=smaller), codes, scales, offsets)


def _orders_columns(parts: Parts, name: str, group: int) -> bool:
    """Return whether the groups of columns, the tensor `name`, are not simply neighbours."""
    import torch

    if not parts.has(name):
        return False
    groups = parts.read(name)
    is_unset = bool((groups == -1).all())
    return not is_unset and not torch.equal(groups.long(), torch.arange(len(groups)) // group)


def _wrong_order(parts: Parts, name: str, group: int) -> str | None:
    """Return what is wrong with the groups of columns, the tensor `name`."""
    if not parts.has(name):
        return None
    groups, most = parts.read(name), -(-parts.shape[1] // group)
    low, high = int(groups.min()), int(groups.max())
    if (low, high) != (-1, -1) and not 0 <= low <= high < most:
        return f"{name} names groups {low} to {high} of {most}"
    return None


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ's: codes packed along inputs, zeros along outputs; a column's group is in `g_idx`.

    Attributes:
        bits: of a code, 4 or 8.
        group: inputs of a group; None: all.
        is_symmetric: the code of zero is half the range everywhere.
        zero_shift: what is added to the stored zeros: 1 for the format `gptq`, 0 for `gptq_v2`.
        needs_order: `desc_act`, with which there must be a `g_idx`.
    """

    bits: int
    group: int | None
    is_symmetric: bool
    zero_shift: int
    needs_order: bool

    def parts(self, out_size: int, in_size: int) -> dict[str, Part]:
        """See `Scheme.parts`."""
        groups = -(-in_size // (self.group or in_size))
        return {
            "qweight": Part((_num_words(in_size, self.bits), out_size), _WORDS),
            "qzeros": Part((groups, _num_words(out_size, self.bits)), _WORDS),
            "scales": Part((groups, out_size)),
            "g_idx": Part((in_size,), _WORDS, optional=not self.needs_order),
        }

    def format(self, in_size: int) -> WeightFormat:
        """See `Scheme.format`."""
        return WeightFormat(self.bits, math.gcd(self.group or in_size, in_size), has_offsets=not self.is_symmetric)

    def read(self, parts: Parts, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `Scheme.read`."""
        from .matrices import with_groups_of_one

        group = self.group or parts.shape[1]
        words, within = cover(columns, _WORD_BITS // self.bits)
        codes = _bytes(parts.read("qweight", words, rows).T)
        codes = codes[:, within.start * self.bits // 8 : within.stop * self.bits // 8]
        if parts.is_ordered:
            at = parts.read("g_idx")[columns].long()
            scales = parts.read("scales", None, rows).T.float()[:, at]
            return with_groups_of_one(codes, self.bits, scales, self._zeros(parts, None, rows)[:, at])
        groups, _ = cover(columns, group)
        scales = parts.read("scales", groups, rows).T
        zeros = None if self.is_symmetric else self._zeros(parts, groups, rows)
        return _sliced(codes, self.format(parts.shape[1]), group, columns, scales, zeros)

    def wrong(self, parts: Parts) -> str | None:
        """See `Scheme.wrong`."""
        if self.is_symmetric:
            zeros = self._zeros(parts, None, slice(0, parts.shape[0]))
            if bool((zeros != 1 << (self.bits - 1)).any()):
                return "qzeros differ from half the range, though the config says sym=true"
        return _wrong_order(parts, "g_idx", self.group or parts.shape[1])

    def is_ordered(self, parts: Parts) -> bool:
        """See `Scheme.is_ordered`."""
        return _orders_columns(parts, "g_idx", self.group or parts.shape[1])

    def _zeros(self, parts: Parts, groups: slice | None, rows: slice) -> torch.Tensor:
        """Return the zeros of some groups, [rows, groups]."""
        words, within = cover(rows, _WORD_BITS // self.bits)
        return _unpacked(parts.read("qzeros", groups, words), self.bits)[:, within].T.int() + self.zero_shift


@dataclass(frozen=True, slots=True)
class Awq(_Plain):
    """AWQ's gemm layout: 4 bits, packed along outputs, eight a word in an order of its own.

    Attributes:
        group: inputs of a group; None: all.
    """

    group: int | None

    def parts(self, out_size: int, in_size: int) -> dict[str, Part]:
        """See `Scheme.parts`."""
        groups = -(-in_size // (self.group or in_size))
        return {
            "qweight": Part((in_size, _num_words(out_size, 4)), _WORDS),
            "qzeros": Part((groups, _num_words(out_size, 4)), _WORDS),
            "scales": Part((groups, out_size)),
        }

    def format(self, in_size: int) -> WeightFormat:
        """See `Scheme.format`."""
        return WeightFormat(4, math.gcd(self.group or in_size, in_size), has_offsets=True)

    def read(self, parts: Parts, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `Scheme.read`."""
        from ...parallel.quantized_matrix import pack_codes

        group = self.group or parts.shape[1]
        words, within = cover(rows, 8)
        groups, _ = cover(columns, group)
        codes, zeros = (
            _unpacked(parts.read(name, part, words), 4).unflatten(1, (-1, 8))[..., _AWQ_NIBBLES].flatten(1)[:, within].T
            for name, part in (("qweight", columns), ("qzeros", groups))
        )
        scales = parts.read("scales", groups, rows).T
        return _sliced(pack_codes(codes, 4), self.format(parts.shape[1]), group, columns, scales, zeros)


@dataclass(frozen=True, slots=True)
class Packed:
    """The `pack-quantized` of compressed-tensors: codes packed along inputs, zeros along outputs.

    Attributes:
        bits: of a code, 4 or 8.
        group: inputs of a group; None: all.
        is_symmetric: the code of zero is half the range everywhere.
        needs_order: there must be a `weight_g_idx`.
    """

    bits: int
    group: int | None
    is_symmetric: bool
    needs_order: bool

    def parts(self, out_size: int, in_size: int) -> dict[str, Part]:
        """See `Scheme.parts`."""
        groups = -(-in_size // (self.group or in_size))
        zeros = (
            {} if self.is_symmetric else {"weight_zero_point": Part((_num_words(out_size, self.bits), groups), _WORDS)}
        )
        return zeros | {
            "weight_packed": Part((out_size, _num_words(in_size, self.bits)), _WORDS),
            "weight_scale": Part((out_size, groups)),
            "weight_shape": Part((2,), ("I64", "I32"), optional=True),
            "weight_g_idx": Part((in_size,), ("I32", "I64"), optional=not self.needs_order),
        }

    def format(self, in_size: int) -> WeightFormat:
        """See `Scheme.format`."""
        return WeightFormat(self.bits, math.gcd(self.group or in_size, in_size), has_offsets=not self.is_symmetric)

    def read(self, parts: Parts, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `Scheme.read`."""
        import torch

        from .matrices import with_groups_of_one

        group = self.group or parts.shape[1]
        words, within = cover(columns, _WORD_BITS // self.bits)
        codes = _bytes(parts.read("weight_packed", rows, words))
        codes = codes[:, within.start * self.bits // 8 : within.stop * self.bits // 8]
        groups = slice(0, -(-parts.shape[1] // group)) if parts.is_ordered else cover(columns, group)[0]
        scales, zeros = parts.read("weight_scale", rows, groups), None
        if not self.is_symmetric:
            packed, inner = cover(rows, _WORD_BITS // self.bits)
            zeros = _unpacked(parts.read("weight_zero_point", packed, groups).T, self.bits)[:, inner].T
        if parts.is_ordered:
            at = parts.read("weight_g_idx")[columns].long()
            zeros = torch.full_like(scales, 1 << (self.bits - 1)) if zeros is None else zeros
            return with_groups_of_one(codes, self.bits, scales.float()[:, at], zeros[:, at])
        return _sliced(codes, self.format(parts.shape[1]), group, columns, scales, zeros)

    def wrong(self, parts: Parts) -> str | None:
        """See `Scheme.wrong`."""
        if parts.has("weight_shape") and tuple(parts.read("weight_shape").tolist()) != parts.shape:
            return f"weight_shape is {parts.read('weight_shape').tolist()}, not {list(parts.shape)}"
        return _wrong_order(parts, "weight_g_idx", self.group or parts.shape[1])

    def is_ordered(self, parts: Parts) -> bool:
        """See `Scheme.is_ordered`."""
        return _orders_columns(parts, "weight_g_idx", self.group or parts.shape[1])


Extent = Literal["tensor", "channel", "group", "block"]


@dataclass(frozen=True, slots=True)
class Bytes(_Plain):
    """Numbers of 8 bits, one a byte: INT8 and FP8 of compressed-tensors, and the method `fp8`.

    Attributes:
        is_float: they are E4M3, and not integers.
        extent: what shares a scale.
        block: rows and columns of a group or block.
        scale: the name of the scales.
        is_symmetric: there are no zero points.
        int8_activations: see `WeightFormat`.
    """

    is_float: bool
    extent: Extent
    block: tuple[int, int] = (1, 1)
    scale: str = "weight_scale"
    is_symmetric: bool = True
    int8_activations: bool = False

    def parts(self, out_size: int, in_size: int) -> dict[str, Part]:
        """See `Scheme.parts`."""
        shape = self._grid((out_size, in_size))
        kinds = (*FLOATS, "F8_E8M0") if self.is_float else FLOATS
        zeros = {} if self.is_symmetric else {"weight_zero_point": Part(shape, ("I8",))}
        return zeros | {
            "weight": Part((out_size, in_size), ("F8_E4M3",) if self.is_float else ("I8",)),
            self.scale: Part(shape, kinds),
        }

    def format(self, in_size: int) -> WeightFormat:
        """See `Scheme.format`."""
        group = math.gcd(self._columns(in_size), in_size)
        return WeightFormat(
            8,
            group,
            has_offsets=not self.is_symmetric,
            int8_activations=self.int8_activations and group == in_size,
            is_float=self.is_float,
        )

    def read(self, parts: Parts, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `Scheme.read`."""
        import torch

        codes = parts.read("weight", rows, columns).view(torch.uint8)
        if not self.is_float:
            codes = codes ^ 128  # from two's complement
        scales = self._of_rows(parts, self.scale, rows, columns)
        zeros = None if self.is_symmetric else self._of_rows(parts, "weight_zero_point", rows, columns) + 128
        group = self._columns(parts.shape[1])
        return _sliced(codes, self.format(parts.shape[1]), group, columns, scales, zeros)

    def _of_rows(self, parts: Parts, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """Read the scales or zeros of each row and of the groups that the columns touch, [rows, groups]."""
        count = rows.stop - rows.start
        if math.prod(self._grid(parts.shape)) == 1:  # some tools write a single number as no matrix
            return parts.read(name).float().reshape(1, 1).expand(count, 1)
        groups, _ = cover(columns, self._columns(parts.shape[1]))
        blocks, within = cover(rows, self.block[0])
        return parts.read(name, blocks, groups).float().repeat_interleave(self.block[0], dim=0)[within]

    def _columns(self, in_size: int) -> int:
        return self.block[1] if self.extent in ("group", "block") else in_size

    def _grid(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the scales."""
        if self.extent == "tensor":
            return (1,)
        return -(-shape[0] // self.block[0]), -(-shape[1] // self._columns(shape[1]))


@dataclass(frozen=True, slots=True)
class Mxfp4(_Plain):
    """MXFP4: E2M1, two a byte, with a power of two for each 32 inputs, whose exponent is stored plus 127."""

    def parts(self, out_size: int, in_size: int) -> dict[str, Part]:
        """See `Scheme.parts`."""
        scales = Part((out_size, -(-in_size // 32)), ("U8", "F8_E8M0"))
        return {"weight_packed": Part((out_size, -(-in_size // 2)), ("U8",)), "weight_scale": scales}

    def format(self, in_size: int) -> WeightFormat:
        """See `Scheme.format`."""
        return WeightFormat(4, math.gcd(32, in_size), is_float=True)

    def read(self, parts: Parts, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `Scheme.read`."""
        import torch

        codes = parts.read("weight_packed", rows, slice(columns.start // 2, -(-columns.stop // 2)))
        scales = parts.read("weight_scale", rows, cover(columns, 32)[0]).view(torch.float8_e8m0fnu)
        return _sliced(codes, self.format(parts.shape[1]), 32, columns, scales)


def is_embedding(name: str) -> bool:
    """Return whether a layer is the embedding of tokens, by its name."""
    return name.endswith(("embed_tokens", "wte"))


SchemeOf = Callable[[str], Scheme | None]  # by the name of a linear layer, as `model.layers.0.mlp.up_proj`
