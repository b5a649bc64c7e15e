"""Base class of all request bodies."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from .fields import GUIDED, current, whole


class Body(BaseModel):
    """Null fields count as absent. Numbers without a fraction count as integers, because JSON has one number type.

    `fields.py` specifies which other fields are ignored or refused.
    """

    model_config = ConfigDict(strict=True, extra="ignore")
    not_computed: ClassVar[frozenset[str]] = frozenset()  # inherited fields that this path does not support

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        present = current({name: value for name, value in given.items() if value is not None})
        return {name: whole(value) for name, value in present.items()}

    @classmethod
    def computed(cls) -> frozenset[str]:
        """Return the names of the fields that the path supports."""
        older = GUIDED if "structured_outputs" in cls.model_fields else ()
        return (frozenset(cls.model_fields) | frozenset(older)) - cls.not_computed
