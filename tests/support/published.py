"""Walks the types that an API's maker publishes for the bodies of requests, and makes bodies of them."""

from __future__ import annotations

import collections.abc
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

import typing_extensions

Place = tuple[str | int, ...]
_PLAIN = {str: "x", bool: False, int: 1, float: 1.0, object: "x", bytes: "x"}


@dataclass(frozen=True, slots=True)
class Variant:
    """A value of a published type, in which one place differs from the least value.

    Attributes:
        path: of the place.
        kind: "value"; or "null" where null is in the place of what may be absent, "float" where an integer is written
            with a fraction of zero, "integer" where a float is written without one.
        value: the whole value.
        alike: a value that means the same, for the kinds other than "value".
    """

    path: Place
    kind: str
    value: Any
    alike: Any = None

    def within(self, key: str | int, wrap: Callable[[Any], Any]) -> Variant:
        """Return the variant of what holds this value at `key`, as `wrap` makes it."""
        alike = None if self.kind == "value" else wrap(self.alike)
        return Variant((key, *self.path), self.kind, wrap(self.value), alike)


def least(kind: Any) -> Any:
    """Return the least value of a published type: of each object the required fields, of a union the first type."""
    origin, inner = _parts(kind)
    if typing_extensions.is_typeddict(origin):
        return {key: least(each) for key, each in _fields(origin).items() if key in _required(origin)}
    if origin is Literal:
        return inner[0]
    if _is_union(origin):
        return least(next(each for each in inner if each is not types.NoneType))
    if _is_list(origin):
        return [least(inner[0])]
    if _is_mapping(origin):
        return {"1": least(inner[1])} if inner else {}
    return _PLAIN.get(origin, "x")


def variants(kind: Any, within: Any = None, seen: set[Any] | None = None) -> Iterator[Variant]:
    """Yield values of a published type: each field of each object within it, one at a time.

    Args:
        kind: the type.
        within: the object type that holds it.
        seen: pairs of object types, the outer one first, that have been walked.
    """
    origin, inner = _parts(kind)
    seen = set() if seen is None else seen
    if typing_extensions.is_typeddict(origin):
        if (within, origin) not in seen:
            seen.add((within, origin))
            yield from _of_fields(origin, seen)
    elif origin is Literal:
        yield from (Variant((), "value", each) for each in inner)
    elif _is_union(origin):
        for each in inner:
            yield from [Variant((), "value", None)] if each is types.NoneType else variants(each, within, seen)
    elif _is_list(origin):
        yield from (each.within(0, lambda value: [value]) for each in variants(inner[0], within, seen))
    elif _is_mapping(origin) and inner:
        yield from (each.within("1", lambda value: {"1": value}) for each in variants(inner[1], within, seen))
    elif origin is int:
        yield Variant((), "value", 1)
        yield Variant((), "float", 1.0, 1)
    elif origin is float:
        yield Variant((), "value", 0.5)
        yield Variant((), "integer", 1, 1.0)
    else:
        yield Variant((), "value", least(kind))


def _of_fields(kind: Any, seen: set[Any]) -> Iterator[Variant]:
    base = least(kind)
    for key, each in _fields(kind).items():

        def wrap(value: Any, key: str = key) -> dict[str, Any]:
            return {**base, key: value}

        yield from (found.within(key, wrap) for found in variants(each, kind, seen))
        if key not in _required(kind):
            absent = {name: value for name, value in base.items() if name != key}
            yield Variant((key,), "null", {**base, key: None}, absent)


def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    while get_origin(kind) in (Required, NotRequired, Annotated, typing_extensions.Required):
        kind = get_args(kind)[0]
    if hasattr(kind, "__value__"):  # an alias
        return _parts(kind.__value__)
    return get_origin(kind) or kind, get_args(kind)


def _fields(kind: Any) -> Mapping[str, Any]:
    return typing_extensions.get_type_hints(kind)


def _required(kind: Any) -> frozenset[str]:
    """Return the fields that must be there. Annotations that are texts hide their marks from `__required_keys__`."""
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    marks: dict[str, Any] = {key: get_origin(each) for key, each in hints.items()}
    own = kind.__required_keys__ if kind.__total__ else frozenset[str]()
    marked = {key for key, mark in marks.items() if mark in (Required, typing_extensions.Required)}
    return frozenset(marked | {key for key in own if marks[key] is not NotRequired})


def _is_union(origin: Any) -> bool:
    return origin in (Union, types.UnionType)


def _is_list(origin: Any) -> bool:
    return origin in (list, Sequence, collections.abc.Iterable) or str(origin).endswith("SequenceNotStr'>")


def _is_mapping(origin: Any) -> bool:
    return origin in (dict, Mapping)
