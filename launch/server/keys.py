"""The API keys that the server accepts."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from ...conf.errors import ConfigError, reason
from ...conf.user_path import user_path

_NAME = "key "


class Keys:
    """The keys of `serve.api_keys`; if there are none, everyone has access.

    Args:
        entries: keys, and files as `@FILE` with one key per line, optionally followed by its name.

    Raises:
        ConfigError: a file cannot be read, or contains no key.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._keys: list[bytes] = []
        self._names: dict[str, str] = {}  # names from files, by holder
        for entry in entries:
            for key, name in _read(Path(entry[1:])) if entry.startswith("@") else [(entry, "")]:
                if name:
                    self._names[f"{_NAME}{len(self._keys)}"] = name
                self._keys.append(key.encode())

    @property
    def are_set(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._keys)

    def holder(self, authorization: str) -> str | None:
        """Return the holder for an Authorization header: "key 0" for the first key, "" if no key is required.

        None: the key is invalid. The comparison takes constant time.
        """
        if not self._keys:
            return ""
        scheme, _, given = authorization.partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        return f"{_NAME}{matches.index(True)}" if scheme.lower() == "bearer" and any(matches) else None

    def shown(self, holder: str) -> str:
        """Return a holder's name in logs and metrics: the name from its file, else "key 0" and so on."""
        return self._names.get(holder, holder)

    def mark(self, holder: str) -> str:
        """Return a stable identifier of a holder's key for files, independent of other keys; "" for no key.

        The key cannot be recovered from it.
        """
        return "" if not holder else _mark(self._keys[int(holder.removeprefix(_NAME))])

    def marked(self, mark: str) -> str:
        """Return the holder of the key with this `mark`; the mark itself if the key no longer exists."""
        return next((f"{_NAME}{number}" for number, key in enumerate(self._keys) if _mark(key) == mark), mark)


def _mark(key: bytes) -> str:
    return hashlib.sha256(b"gapless key " + key).hexdigest()[:32]


def _read(file: Path) -> list[tuple[str, str]]:
    """Return each key of a file with its name, which may be empty."""
    try:
        lines = user_path(file, "serve.api_keys").read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.api_keys=[@{file}]: cannot be read ({reason(error)})") from error
    keys = [(key, name.strip()) for key, _, name in (line.strip().partition(" ") for line in lines) if key]
    if not keys:
        raise ConfigError(f"serve.api_keys=[@{file}]: contains no key; write one key per line")
    return keys
