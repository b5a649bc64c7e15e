"""How checkpoints store a quantized weight: the tensors of a linear layer, and the matrix that is read from them.

Weights are [out, in] here, regardless of the tensors' layout. A slice is unpacked with a few vectorized operations.
This file imports no torch until it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from ...kernels.weight_format import WeightFormat
from ..safetensors_folder import FLOATS, SafetensorsFolder, StoredTensor

if TYPE_CHECKING:
    import torch

    from ...kernels.quantized_matrix import QuantizedMatrix

_WORDS = ("I32",)
_WORD_BITS = 32
# The nibble of each of the 8 outputs in a word of AWQ's gemm layout, which AutoAWQ packs in the order 0 2 4 6 1 3 5 7.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(slots=True)
class StoredLayer:
    """The tensors of a linear layer with a quantized weight.

    Attributes:
        prefix: prefix of the tensor names in the folder.
        suffix: index of an expert in tensors of all experts, such as `[3]`; else empty.
        shape: weight shape, [out, in].
        is_transposed: an unquantized checkpoint stores the weight as [in, out].
    """

    folder: SafetensorsFolder
    prefix: str
    suffix: str
    shape: tuple[int, int]
    scheme: Scheme
    is_transposed: bool
    _is_ordered: bool | None = None

    @property
    def is_ordered(self) -> bool:
        """The cached result of `Scheme.is_ordered`."""
        if self._is_ordered is None:
            self._is_ordered = self.scheme.is_ordered(self)
        return self._is_ordered

    def tensor(self, part: str) -> str:
        """Return the name of one of its tensors."""
        return f"{self.prefix}{part}{self.suffix}"

    def has(self, name: str) -> bool:
        """Return whether there is such a tensor."""
        return self.folder.has(self.tensor(name))

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """Read a tensor, or a slice of it. Vectors and scalars have neither `rows` nor `columns`."""
        return self.folder.tensor(self.tensor(name), rows, columns)


class Scheme:
    """A storage scheme of quantized weights."""

    def parts(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """Return the tensors that store a weight, by their names within the linear layer."""
        raise NotImplementedError

    def format(self, in_size: int) -> WeightFormat:
        """Return the format that holds the weight without loss."""
        raise NotImplementedError

    def read(self, layer: StoredLayer, rows: slice, columns: slice) -> QuantizedMatrix:
        """Read a slice of the weight. The columns start and stop at multiples of 16, or are all."""
        raise NotImplementedError

    def wrong(self, layer: StoredLayer) -> str | None:
        """Return an error in the tensors' contents, starting with a tensor name; None: no error."""
        return None

    def is_ordered(self, layer: StoredLayer) -> bool:
        """Return whether columns are grouped in activation order (`desc_act`), which rules out slicing groups."""
        return False


def cover(part: slice, size: int) -> tuple[slice, slice]:
    """Return the units of `size` that a slice touches, and the slice within them."""
    first = part.start // size
    return slice(first, -(-part.stop // size)), slice(part.start - first * size, part.stop - first * size)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """Return words [..., n] as bytes, [..., 4 * n]."""
    import torch

    return words.contiguous().view(torch.uint8)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack words [..., n] into quantized values, the lowest bits first, [..., n * 32 / bits]."""
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
    """Build a matrix from quantized values, with scales and zeros [rows, groups] of the groups that columns touch."""
    from ...kernels.quantized_matrix import QuantizedMatrix
    from .matrices import cut_groups

    scales, smaller = cut_groups(scales.float(), group, columns)
    offsets = None if zeros is None else -scales * cut_groups(zeros.float(), group, columns)[0]
    return QuantizedMatrix(replace(format, group=smaller), codes, scales, offsets)


@dataclass(frozen=True, kw_only=True)
class _InWords(Scheme):
    """4-bit or 8-bit values packed into words along inputs, with zeros packed along outputs.

    Attributes:
        bits: per value, 4 or 8.
        group: inputs per group; None: all.
        is_symmetric: the zero point is always half the range.
        needs_order: the tensor `order`, with the group of each input, is required.
    """

    bits: int
    group: int | None
    is_symmetric: bool
    needs_order: bool
    order: ClassVar[str]

    def format(self, in_size: int) -> WeightFormat:
        """See `Scheme.format`."""
        return WeightFormat(self.bits, math.gcd(self.group or in_size, in_size), has_offsets=not self.is_symmetric)

    def read(self, layer: StoredLayer, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `Scheme.read`."""
        from .matrices import with_groups_of_one

        group = self.group or layer.shape[1]
        words, within = cover(columns, self._in_word)
        codes = _bytes(self._words(layer, rows, words))
        codes = codes[:, within.start * self.bits // 8 : within.stop * self.bits // 8]
        if layer.is_ordered:
            groups, at = slice(0, self._groups(layer.shape[1])), layer.read(self.order)[columns].long()
            scales, zeros = self._scales(layer, rows, groups), self._zeros(layer, rows, groups)
            return with_groups_of_one(codes, self.bits, scales.float()[:, at], zeros[:, at])
        groups, _ = cover(columns, group)
        own_zeros = None if self.is_symmetric else self._zeros(layer, rows, groups)
        return _sliced(codes, self.format(layer.shape[1]), group, columns, self._scales(layer, rows, groups), own_zeros)

    def wrong(self, layer: StoredLayer) -> str | None:
        """See `Scheme.wrong`."""
        if not layer.has(self.order):
            return None
        groups, most = layer.read(self.order), self._groups(layer.shape[1])
        low, high = int(groups.min()), int(groups.max())
        is_right = (low, high) == (-1, -1) or 0 <= low <= high < most
        return None if is_right else f"{self.order} names groups {low} to {high} of {most}"

    def is_ordered(self, layer: StoredLayer) -> bool:
        """See `Scheme.is_ordered`. An order of only -1 is unused."""
        import torch

        if not layer.has(self.order):
            return False
        groups = layer.read(self.order)
        neighbours = torch.arange(len(groups)) // (self.group or len(groups))
        return not bool((groups == -1).all()) and not torch.equal(groups.long(), neighbours)

    @property
    def _in_word(self) -> int:
        return _WORD_BITS // self.bits

    def _groups(self, in_size: int) -> int:
        return -(-in_size // (self.group or in_size))

    def _words(self, layer: StoredLayer, rows: slice, words: slice) -> torch.Tensor:
        """Read packed words, [rows, words]."""
        raise NotImplementedError

    def _scales(self, layer: StoredLayer, rows: slice, groups: slice) -> torch.Tensor:
        """Read scales, [rows, groups]."""
        raise NotImplementedError

    def _zeros(self, layer: StoredLayer, rows: slice, groups: slice) -> torch.Tensor:
        """Read zero points, [rows, groups]."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Gptq(_InWords):
    """GPTQ: each word packs eight or four inputs of one output.

    Attributes:
        zero_shift: added to the stored zeros: 1 for the format `gptq`, 0 for `gptq_v2`.
    """

    zero_shift: int
    order = "g_idx"

    def parts(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """See `Scheme.parts`."""
        groups = self._groups(in_size)
        return {
            "qweight": StoredTensor((-(-in_size // self._in_word), out_size), _WORDS),
            "qzeros": StoredTensor((groups, -(-out_size // self._in_word)), _WORDS),
            "scales": StoredTensor((groups, out_size)),
            "g_idx": StoredTensor((in_size,), _WORDS, optional=not self.needs_order),
        }

    def wrong(self, layer: StoredLayer) -> str | None:
        """See `Scheme.wrong`."""
        if self.is_symmetric:
            groups = slice(0, self._groups(layer.shape[1]))
            if bool((self._zeros(layer, slice(0, layer.shape[0]), groups) != 1 << (self.bits - 1)).any()):
                return "qzeros differ from half the range, though the config says sym=true"
        return super().wrong(layer)

    def _words(self, layer: StoredLayer, rows: slice, words: slice) -> torch.Tensor:
        return layer.read("qweight", words, rows).T

    def _scales(self, layer: StoredLayer, rows: slice, groups: slice) -> torch.Tensor:
        return layer.read("scales", groups, rows).T

    def _zeros(self, layer: StoredLayer, rows: slice, groups: slice) -> torch.Tensor:
        words, within = cover(rows, self._in_word)
        return _unpacked(layer.read("qzeros", groups, words), self.bits)[:, within].T.int() + self.zero_shift


@dataclass(frozen=True, kw_only=True)
class Packed(_InWords):
    """The format `pack-quantized` of compressed-tensors: a row of the weight is stored as a row of packed words."""

    order = "weight_g_idx"

    def parts(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """See `Scheme.parts`."""
        groups = self._groups(in_size)
        zeros = StoredTensor((-(-out_size // self._in_word), groups), _WORDS)
        return ({} if self.is_symmetric else {"weight_zero_point": zeros}) | {
            "weight_packed": StoredTensor((out_size, -(-in_size // self._in_word)), _WORDS),
            "weight_scale": StoredTensor((out_size, groups)),
            "weight_shape": StoredTensor((2,), ("I64", "I32"), optional=True),
            "weight_g_idx": StoredTensor((in_size,), ("I32", "I64"), optional=not self.needs_order),
        }

    def wrong(self, layer: StoredLayer) -> str | None:
        """See `Scheme.wrong`."""
        if layer.has("weight_shape") and tuple(layer.read("weight_shape").tolist()) != layer.shape:
            return f"weight_shape is {layer.read('weight_shape').tolist()}, not {list(layer.shape)}"
        return super().wrong(layer)

    def _words(self, layer: StoredLayer, rows: slice, words: slice) -> torch.Tensor:
        return layer.read("weight_packed", rows, words)

    def _scales(self, layer: StoredLayer, rows: slice, groups: slice) -> torch.Tensor:
        return layer.read("weight_scale", rows, groups)

    def _zeros(self, layer: StoredLayer, rows: slice, groups: slice) -> torch.Tensor:
        import torch

        if self.is_symmetric:
            return torch.tensor(1 << (self.bits - 1)).expand(rows.stop - rows.start, groups.stop - groups.start)
        words, within = cover(rows, self._in_word)
        return _unpacked(layer.read("weight_zero_point", words, groups).T, self.bits)[:, within].T


@dataclass(frozen=True, kw_only=True)
class Awq(_InWords):
    """AWQ's gemm layout: 4 bits, packed along outputs, eight per word in AWQ's interleaved order."""

    bits: int = 4
    is_symmetric: bool = False
    needs_order: bool = False
    order = "g_idx"  # never present in AWQ checkpoints

    def parts(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """See `Scheme.parts`."""
        groups, words = self._groups(in_size), -(-out_size // self._in_word)
        return {
            "qweight": StoredTensor((in_size, words), _WORDS),
            "qzeros": StoredTensor((groups, words), _WORDS),
            "scales": StoredTensor((groups, out_size)),
        }

    def read(self, layer: StoredLayer, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `Scheme.read`."""
        from ...kernels.quantized_matrix import pack_codes

        group = self.group or layer.shape[1]
        words, within = cover(rows, 8)
        groups, _ = cover(columns, group)
        codes, zeros = (
            _unpacked(layer.read(name, part, words), 4).unflatten(1, (-1, 8))[..., _AWQ_NIBBLES].flatten(1)[:, within].T
            for name, part in (("qweight", columns), ("qzeros", groups))
        )
        scales = layer.read("scales", groups, rows).T
        return _sliced(pack_codes(codes, 4), self.format(layer.shape[1]), group, columns, scales, zeros)


Extent = Literal["tensor", "channel", "group", "block"]


@dataclass(frozen=True, slots=True)
class Bytes(Scheme):
    """8-bit values, one per byte: INT8 and FP8 of compressed-tensors, and the method `fp8`.

    Attributes:
        is_float: E4M3 instead of integers.
        extent: granularity of the scales.
        block: rows and columns of a group or block.
        scale: name of the scale tensor.
        is_symmetric: there are no zero points.
        int8_activations: see `WeightFormat`.
    """

    is_float: bool
    extent: Extent
    block: tuple[int, int] = (1, 1)
    scale: str = "weight_scale"
    is_symmetric: bool = True
    int8_activations: bool = False

    def parts(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """See `Scheme.parts`."""
        shape = self._grid((out_size, in_size))
        kinds = (*FLOATS, "F8_E8M0") if self.is_float else FLOATS
        zeros = {} if self.is_symmetric else {"weight_zero_point": StoredTensor(shape, ("I8",))}
        return zeros | {
            "weight": StoredTensor((out_size, in_size), ("F8_E4M3",) if self.is_float else ("I8",)),
            self.scale: StoredTensor(shape, kinds),
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

    def read(self, layer: StoredLayer, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `Scheme.read`."""
        import torch

        codes = layer.read("weight", rows, columns).view(torch.uint8)
        if not self.is_float:
            codes = codes ^ 128  # from two's complement
        scales = self._of_rows(layer, self.scale, rows, columns)
        zeros = None if self.is_symmetric else self._of_rows(layer, "weight_zero_point", rows, columns) + 128
        group = self._columns(layer.shape[1])
        return _sliced(codes, self.format(layer.shape[1]), group, columns, scales, zeros)

    def _of_rows(self, layer: StoredLayer, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """Read the scales or zeros of the rows, for the groups that the columns touch, [rows, groups]."""
        count = rows.stop - rows.start
        if math.prod(self._grid(layer.shape)) == 1:  # some tools do not store a single scale as a matrix
            return layer.read(name).float().reshape(1, 1).expand(count, 1)
        groups, _ = cover(columns, self._columns(layer.shape[1]))
        blocks, within = cover(rows, self.block[0])
        return layer.read(name, blocks, groups).float().repeat_interleave(self.block[0], dim=0)[within]

    def _columns(self, in_size: int) -> int:
        return self.block[1] if self.extent in ("group", "block") else in_size

    def _grid(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the scales."""
        if self.extent == "tensor":
            return (1,)
        return -(-shape[0] // self.block[0]), -(-shape[1] // self._columns(shape[1]))


@dataclass(frozen=True, slots=True)
class Mxfp4(Scheme):
    """MXFP4: E2M1, two per byte, with an E8M0 scale (power of two, bias 127) per 32 inputs."""

    def parts(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """See `Scheme.parts`."""
        scales = StoredTensor((out_size, -(-in_size // 32)), ("U8", "F8_E8M0"))
        return {"weight_packed": StoredTensor((out_size, -(-in_size // 2)), ("U8",)), "weight_scale": scales}

    def format(self, in_size: int) -> WeightFormat:
        """See `Scheme.format`."""
        return WeightFormat(4, math.gcd(32, in_size), is_float=True)

    def read(self, layer: StoredLayer, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `Scheme.read`."""
        import torch

        codes = layer.read("weight_packed", rows, slice(columns.start // 2, -(-columns.stop // 2)))
        scales = layer.read("weight_scale", rows, cover(columns, 32)[0]).view(torch.float8_e8m0fnu)
        return _sliced(codes, self.format(layer.shape[1]), 32, columns, scales)


class Mxfp4Blocks(Mxfp4):
    """MXFP4 of gpt-oss: blocks, with one tensor for all experts."""

    def parts(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """See `Scheme.parts`."""
        groups = in_size // 32
        sizes = {"_blocks": (out_size, groups, 16), "_scales": (out_size, groups)}
        return {name: StoredTensor(size, ("U8",)) for name, size in sizes.items()}

    def read(self, layer: StoredLayer, rows: slice, columns: slice) -> QuantizedMatrix:
        """See `Scheme.read`."""
        import torch

        groups, within = cover(columns, 32)
        codes = layer.read("_blocks", rows, groups).flatten(1)[:, within.start // 2 : within.stop // 2]
        scales = layer.read("_scales", rows, groups).view(torch.float8_e8m0fnu)
        return _sliced(codes, self.format(layer.shape[1]), 32, columns, scales)


def is_embedding(name: str) -> bool:
    """Return whether a layer is the token embedding, by its name."""
    return name.endswith(("embed_tokens", "wte"))


SchemeOf = Callable[[str], Scheme | None]  # by linear layer name, such as `model.layers.0.mlp.up_proj`
