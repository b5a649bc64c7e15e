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
    """The keys of `serve.api_keys`; without any, everyone is let in.

    Args:
        entries: keys, and files as `@FILE` with a key a line, and its name behind it.

    Raises:
        ConfigError: a file cannot be read, or holds no key.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._keys: list[bytes] = []
        self._names: dict[str, str] = {}  # those that files give, by holder
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
        """Return the name of the key that this header bears: "key 0" for the first, "" where no key is asked for.

        The time that it takes tells nothing of how near a wrong key came. None: it bears none of the keys.
        """
        if not self._keys:
            return ""
        scheme, _, given = authorization.partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        return f"{_NAME}{matches.index(True)}" if scheme.lower() == "bearer" and any(matches) else None

    def shown(self, holder: str) -> str:
        """Return what the log and the metrics call a holder: the name that its file gives, else "key 0" and so on."""
        return self._names.get(holder, holder)

    def mark(self, holder: str) -> str:
        """Return what stands for the key of that name in a file, also after keys were added or removed.

        Nobody can tell the key from it. "" stands for none.
        """
        return "" if not holder else _mark(self._keys[int(holder.removeprefix(_NAME))])

    def marked(self, mark: str) -> str:
        """Return the name of the key that `mark` stands for: the mark itself where that key is gone."""
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
        raise ConfigError(f"serve.api_keys=[@{file}]: holds no key; write one a line")
    return keys
