"""The values of a config.json. Each is checked when read; unread keys raise an error."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..conf.errors import ConfigError
from .json_file import read_object


class ModelValues:
    """The values of a config.json, or of an object in it, by key.

    `asked` contains the keys that were read. Errors name the key and the file. If `transformers` does not accept null
    for a key, null is an error here too. `within` is the prefix of an inner object's keys in errors: `rope_scaling.`.
    """

    def __init__(self, path: Path, values: dict[str, Any], within: str = "") -> None:
        self.path = path
        self.values = values
        self.within = within
        self.asked: set[str] = set()

    @classmethod
    def read(cls, path: Path) -> ModelValues:
        """Read a file. Raises `ConfigError` like `read_object`."""
        return cls(path, read_object(path))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if the key is missing or null."""
        value = self._raw(key, default)
        return default if value is None else value

    def first(self, *keys: str) -> str:
        """Return the first of `keys` that is in the file, else the last one."""
        self.asked.update(keys)
        return next((key for key in keys if key in self.values), keys[-1])

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer."""
        value = self._raw(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(key, "an integer")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """Return an integer of 1 or more."""
        value = self.integer(key, default)
        if value < 1:
            raise self.wrong(key, "1 or more")
        return value

    def positive_or_null(self, key: str, default: int | None = None) -> int | None:
        """Return an integer of 1 or more, or None for null."""
        value = self._raw(key, default)
        return None if value is None else self.positive(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._raw(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < sys.float_info.max:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def number_or_null(self, key: str, default: float | None = None) -> float | None:
        """Return a finite number above 0, or None for null."""
        value = self._raw(key, default)
        return None if value is None else self.number(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def names(self, key: str) -> list[str]:
        """Return a list of names; empty if it is missing or null."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, "a list of names")
        return value

    def token(self, key: str) -> int | None:
        """Return a token id, which may be null."""
        value = self.get(key)
        if value is not None and type(value) is not int:
            raise self.wrong(key, "a token id or null")
        return value

    def tokens(self, key: str) -> list[int]:
        """Return a token id or list of ids as a list; empty if there are none."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int for i in ids):
            raise self.wrong(key, "a token id, a list of them, or null")
        return ids

    def part(self, key: str) -> ModelValues:
        """Return an object in the file; empty if it is missing or null."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return ModelValues(self.path, value, f"{self.within}{key}.")

    def wrong(self, key: str, right: str) -> ConfigError:
        """Return the error for a value that must be something else."""
        return ConfigError(f"{self.path}: {self.within}{key}={self.values.get(key)!r}: must be {right}")

    def unsupported(self, what: str) -> ConfigError:
        """Return the error for a feature that is not supported."""
        return ConfigError(f"{self.path}: {what} is not supported")

    def refuse_others(self, harmless: Collection[str]) -> None:
        """Check that every key was read, is `harmless`, or is off: null, false or empty.

        Raises:
            ConfigError: a key is none of these, so it may change what the model computes.
        """
        for key, value in self.values.items():
            if key not in self.asked and key not in harmless and value not in (None, False, "", [], {}):
                raise ConfigError(
                    f"{self.path}: {self.within}{key}={str(value)[:60]} is unknown for this model, and may change what "
                    "it computes; remove the key if it does not"
                )

    def _raw(self, key: str, default: Any) -> Any:
        self.asked.add(key)
        return self.values.get(key, default)
