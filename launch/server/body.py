"""What the bodies of all requests share."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class Body(BaseModel):
    """Null is as absent, for each field. A number without a fraction is an integer, as JSON has one kind of number.

    `fields.py` says what becomes of other fields.
    """

    model_config = ConfigDict(strict=True, extra="ignore")
    not_computed: ClassVar[frozenset[str]] = frozenset()  # inherited fields that this path does not have

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        present = {name: value for name, value in given.items() if value is not None}
        whole = {name: int(each) for name, each in present.items() if isinstance(each, float) and each.is_integer()}
        return present | whole

    @classmethod
    def computed(cls) -> frozenset[str]:
        """Return the names of the fields that the path computes."""
        return frozenset(cls.model_fields) - cls.not_computed
