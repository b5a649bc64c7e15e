"""Meanings of config keys: the docstrings under the fields in the schema's source."""

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
    """Return the meaning of every leaf under `cls`, by its dotted key.

    The meaning of a key that only some policies or workloads have starts with their names: `zipf: exponent of the Zipf
    law of P + D`. Different meanings of one key are all listed.
    """
    names_by_meaning: dict[str, dict[str, list[str]]] = {}  # by key, then by meaning: the policies or workloads
    for key, _, owner in leaf_fields(cls):
        documenting_class, meaning = field_meaning(owner, key.rpartition(".")[2])
        names = names_by_meaning.setdefault(key, {}).setdefault(meaning, [])
        if documenting_class in _MEMBERS:
            names.append(_MEMBERS[documenting_class])
    return {
        key: "; ".join(f"{', '.join(names)}: {meaning}" if names else meaning for meaning, names in of_key.items())
        for key, of_key in names_by_meaning.items()
    }


def field_meaning(cls: type, name: str) -> tuple[type, str]:
    """Return the docstring of a field, in one line, and the class that has it: `cls` or a base.

    Raises:
        LookupError: the field has no docstring.
    """
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        if (base.__name__, name) in (found := _docstrings(base.__module__)):
            return base, found[base.__name__, name]
    raise LookupError(f"{cls.__name__}.{name}: has no docstring")


@lru_cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstring of each field of a module's classes, by class and field."""
    found: dict[tuple[str, str], str] = {}
    for cls in ast.parse(inspect.getsource(sys.modules[module])).body:
        if not isinstance(cls, ast.ClassDef):
            continue
        for field, following in pairwise(cls.body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = following.value.value
                if isinstance(text, str):
                    name = field.target.id.removesuffix("_")  # the field `import_` holds the key `import`
                    found[cls.name, name] = " ".join(text.split())
    return found
