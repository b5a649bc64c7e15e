"""The journal of a server: a file of the requests that it has accepted and of their tokens.

Each record has a head, the length of its payload and the payload's CRC-32 in 4 bytes each, and a payload of msgpack.
The file only grows, until it is compacted: what is still of use is written to a new file that takes its place.

A record reaches the operating system before its token reaches a client, so a journal survives its server, but not its
machine: nothing waits for the disk.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ...conf.errors import ConfigError, reason
from ..core.messages import TokenLogprobs
from .messages import Tokens

KEY = "serve.journal"
_VERSION = 1
_HEAD = struct.Struct("!II")
_LARGE = 64 << 20  # bytes


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="gapless journal"):
    """The first record: what the outputs depend on, and the number of the next request."""

    version: int
    model: str
    fingerprint: str
    next_number: int

    def is_alike(self, other: Opened) -> bool:
        """Return whether outputs that were begun under one of them can go on under the other."""
        return (self.version, self.fingerprint) == (other.version, other.fingerprint)


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """A request of the API.

    It has its id, the mark of its key, its path, its body as it came, when it came (in seconds since 1970), and the
    numbers of its outputs.
    """

    id: str
    owner: str
    path: str
    body: bytes
    created: int
    numbers: list[int]


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """What an output has got so far. `reason` is why the engine ended it, None where it did not."""

    number: int
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached: int = 0
    reason: str | None = None


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """Nobody waits for the answer to these outputs any more."""

    numbers: list[int]


Record = Opened | Accepted | Progress | Settled | Tokens

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


@dataclass(slots=True)
class Saved:
    """A request of the journal that is not settled, and what its outputs have got, by their numbers."""

    accepted: Accepted
    outputs: dict[int, Progress] = field(default_factory=dict)


class Journal:
    """A journal that is open for writing. No other server can open it.

    Attributes:
        path: of the file.
        saved: the requests that were unsettled when it was opened, by the numbers of their first outputs.
        next_number: above the numbers of all requests that it has named.
        cut_bytes: bytes at its end that were no whole record, and are cut off.
        size: bytes of the file.

    Args:
        model: the model's name.
        fingerprint: of all that outputs depend on.

    Raises:
        ConfigError: the file cannot be written, is no journal, another server has it, or it holds requests of another
            model.
    """

    def __init__(self, path: Path, model: str, fingerprint: str) -> None:
        self.path = path
        self._fd = _open_alone(path)
        try:
            self._read(memoryview(path.read_bytes()), model, fingerprint)
            os.ftruncate(self._fd, self.size)
        except BaseException:
            os.close(self._fd)
            raise

    def _read(self, data: memoryview, model: str, fingerprint: str) -> None:
        records = list(_records(data))
        first = records[0][1] if records else None
        if data and not isinstance(first, Opened):
            raise ConfigError(f"{KEY}={self.path}: it is no journal; give another file")
        self.size = records[-1][0] if records else 0
        self.cut_bytes = len(data) - self.size
        self.next_number = first.next_number if isinstance(first, Opened) else 0
        found: dict[int, Saved] = {}  # by the number of each output
        for _, record in records:
            if isinstance(record, Accepted):
                found |= dict.fromkeys(record.numbers, Saved(record))
                self.next_number = max(self.next_number, record.numbers[-1] + 1)
            elif isinstance(record, Settled):
                for number in record.numbers:
                    found.pop(number, None)
            elif isinstance(record, Progress) and record.number in found:
                found[record.number].outputs[record.number] = record
            elif isinstance(record, Tokens):
                _add(found, record)
        self.saved = [saved for number, saved in sorted(found.items()) if number == saved.accepted.numbers[0]]
        self._opened = Opened(_VERSION, model, fingerprint, self.next_number)
        if isinstance(first, Opened) and self.saved and not first.is_alike(self._opened):
            raise ConfigError(
                f"{KEY}={self.path}: it holds {len(self.saved)} unfinished requests of {first.model}, whose model or "
                "seed is not that of this server; start it with theirs, or give another file"
            )
        self._compact_at = _LARGE

    @property
    def is_large(self) -> bool:
        """Whether it is time to compact it."""
        return self.size >= self._compact_at

    def write(self, record: Record) -> None:
        """Append a record.

        Raises:
            OSError: the file cannot take it; it holds what it held before.
        """
        if isinstance(record, Accepted):
            self.next_number = max(self.next_number, record.numbers[-1] + 1)
        self.write_encoded(_encoder.encode(record))

    def write_encoded(self, payload: bytes) -> None:
        """Append a record that is encoded already.

        Raises:
            OSError: as of `write`.
        """
        self.size += _append(self._fd, payload, self.size)

    def compact(self, records: Iterable[Record]) -> None:
        """Put a file of these records in the place of the one that there is.

        Raises:
            OSError: it cannot be written; the journal is as it was.
        """
        path = self.path.with_name(self.path.name + ".new")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            size = 0
            for record in (msgspec.structs.replace(self._opened, next_number=self.next_number), *records):
                size += _append(fd, _encoder.encode(record), size)
            path.rename(self.path)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd, self.size = fd, size
        self._compact_at = max(_LARGE, 2 * size)

    def close(self) -> None:
        """Close the file, which another server may open from now on."""
        os.close(self._fd)


def _open_alone(path: Path) -> int:
    """Open a file that no other server has open as its journal."""
    try:
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise ConfigError(f"{KEY}={path}: must be a regular file")
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(path)):  # else it was compacted meanwhile
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
    except BlockingIOError:
        raise ConfigError(f"{KEY}={path}: another server writes it; give each its own") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{KEY}={path}: {reason(error)}; give a file that can be written") from None


def _append(fd: int, payload: bytes, at: int) -> int:
    """Write a record at the end of a file of `at` bytes; return the record's bytes."""
    record = _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
    try:
        written = os.pwrite(fd, record, at)
        while written < len(record):
            written += os.pwrite(fd, record[written:], at + written)
    except OSError:
        os.ftruncate(fd, at)
        raise
    return len(record)


def payloads(data: memoryview) -> Iterator[memoryview]:
    """Yield the payloads of the records at the beginning of a journal that are whole."""
    at = 0
    while len(data) - at >= _HEAD.size:
        length, checksum = _HEAD.unpack_from(data, at)
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        at += _HEAD.size + length
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield payload


def _records(data: memoryview) -> Iterator[tuple[int, Record]]:
    """Yield the records of a journal that are whole, each with the place of its end."""
    at = 0
    for payload in payloads(data):
        at += _HEAD.size + len(payload)
        try:
            yield at, _decoder.decode(payload)
        except msgspec.MsgspecError:
            return


def _add(found: dict[int, Saved], message: Tokens) -> None:
    """Add what a message of the engine says to the outputs that it is about."""
    for place, (number, token) in enumerate(zip(message.numbers, message.tokens, strict=True)):
        if (saved := found.get(number)) is None:
            continue
        output = saved.outputs.setdefault(number, Progress(number, [], []))
        if token >= 0:
            output.tokens.append(token)
        if (logprobs := message.logprobs.get(place)) is not None:
            output.logprobs.append(logprobs)
        if (of_prompt := message.prompt_logprobs.get(place)) is not None:
            output.prompt_logprobs = of_prompt
        output.cached += message.cached.get(place, 0)
        output.reason = message.reasons.get(place)
