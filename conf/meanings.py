"""What each config key means: the docstring under its field, read from the schema's source."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from functools import lru_cache
from itertools import pairwise

from .build import leaf_fields
from .policies import POLICY_CONFIGS
from .workloads import WORKLOAD_CONFIGS

_MEMBERS = {member: name for family in (POLICY_CONFIGS, WORKLOAD_CONFIGS) for name, member in family.items()}


def meanings(cls: type) -> dict[str, str]:
    """The meaning of every leaf under `cls`, by its dotted key.

    What a policy or workload says of a key of its own begins with its name: `zipf: exponent of the law of P + D`.
    """
    speakers: dict[str, dict[str, list[str]]] = {}  # by key and meaning: the policies or workloads that say it
    for key, _, owner in leaf_fields(cls):
        documented, meaning = field_meaning(owner, key.rpartition(".")[2])
        names = speakers.setdefault(key, {}).setdefault(meaning, [])
        if documented in _MEMBERS:
            names.append(_MEMBERS[documented])
    return {
        key: "; ".join(f"{', '.join(names)}: {meaning}" if names else meaning for meaning, names in of_key.items())
        for key, of_key in speakers.items()
    }


def field_meaning(cls: type, name: str) -> tuple[type, str]:
    """The docstring of a field, in one line, and the class that documents it: `cls` or a base.

    Raises:
        LookupError: the field has none.
    """
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        if (base.__name__, name) in (found := _docstrings(base.__module__)):
            return base, found[base.__name__, name]
    raise LookupError(f"{cls.__name__}.{name}: no docstring says what it means")


@lru_cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """The docstring of each field of a module's classes, by class and field."""
    return {
        (cls.name, field.target.id.removesuffix("_")): " ".join(text.value.value.split())
        for cls in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(cls, ast.ClassDef)
        for field, text in pairwise(cls.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
