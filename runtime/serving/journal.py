"""The server's journal: a file of its accepted requests and their tokens.

Each record has a header (the payload's length and its CRC-32, 4 bytes each) and a msgpack payload. The file is
append-only until it is compacted: live records are written to a new file, which replaces it.

A record reaches the operating system before its token reaches a client. The journal therefore survives a crash of the
server, but not of the machine: there is no fsync.
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
    """The first record: what outputs depend on, and the next request number."""

    version: int
    model: str
    fingerprint: str
    next_number: int

    def is_alike(self, other: Opened) -> bool:
        """Return whether outputs started under one can be continued under the other."""
        return (self.version, self.fingerprint) == (other.version, other.fingerprint)


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """A request of the API.

    `owner` identifies its API key. `body` is as received, `created` in Unix seconds. `numbers`: one per output.
    """

    id: str
    owner: str
    path: str
    body: bytes
    created: int
    numbers: list[int]


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """The progress of an output. `reason`: the engine's finish reason; None if it has not ended."""

    number: int
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached: int = 0
    reason: str | None = None


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """The client has received these outputs, or no longer wants them."""

    numbers: list[int]


Record = Opened | Accepted | Progress | Settled | Tokens

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


@dataclass(slots=True)
class Saved:
    """An unsettled request of the journal, and the progress of its outputs, by number."""

    accepted: Accepted
    outputs: dict[int, Progress] = field(default_factory=dict)


class Journal:
    """A journal open for writing, locked against other servers.

    Attributes:
        path: the file's path.
        saved: requests that were unsettled when it was opened, ordered by their first output's number.
        next_number: greater than all request numbers in the journal.
        cut_bytes: bytes of an incomplete record at the end, which were truncated.
        size: bytes of the file.

    Args:
        model: the model's name.
        fingerprint: hash of everything that outputs depend on.

    Raises:
        ConfigError: the file cannot be written, is not a journal, is in use by another server, or has requests of
            another model.
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
            raise ConfigError(f"{KEY}={self.path}: is not a journal; choose another file")
        self.size = records[-1][0] if records else 0
        self.cut_bytes = len(data) - self.size
        self.next_number = first.next_number if isinstance(first, Opened) else 0
        found: dict[int, Saved] = {}  # by output number
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
                f"{KEY}={self.path}: has {len(self.saved)} unfinished requests of {first.model}, with another model "
                "or seed than this server; start the server with theirs, or choose another file"
            )
        self._compact_at = _LARGE

    @property
    def is_large(self) -> bool:
        """Whether the journal should be compacted."""
        return self.size >= self._compact_at

    def write(self, record: Record) -> None:
        """Append a record.

        Raises:
            OSError: the write failed; the file is unchanged.
        """
        if isinstance(record, Accepted):
            self.next_number = max(self.next_number, record.numbers[-1] + 1)
        self.write_encoded(_encoder.encode(record))

    def write_encoded(self, payload: bytes) -> None:
        """Append an encoded record.

        Raises:
            OSError: as in `write`.
        """
        self.size += _append(self._fd, payload, self.size)

    def compact(self, records: Iterable[Record]) -> None:
        """Replace the file by one with these records.

        Raises:
            OSError: the write failed; the journal is unchanged.
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
        """Close the file and release its lock."""
        os.close(self._fd)


def _open_alone(path: Path) -> int:
    """Open and lock a journal file, unless another server has locked it."""
    try:
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise ConfigError(f"{KEY}={path}: must be a regular file")
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(path)):  # otherwise it was compacted meanwhile
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
    except BlockingIOError:
        raise ConfigError(f"{KEY}={path}: in use by another server; give each its own") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{KEY}={path}: {reason(error)}; choose a writable file") from None


def _append(fd: int, payload: bytes, at: int) -> int:
    """Write a record at the end of a file of `at` bytes; return the record's size."""
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
    """Yield the payloads of a journal up to the first incomplete or corrupt record."""
    at = 0
    while len(data) - at >= _HEAD.size:
        length, checksum = _HEAD.unpack_from(data, at)
        payload = data[at + _HEAD.size : at + _HEAD.size + length]
        at += _HEAD.size + length
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield payload


def _records(data: memoryview) -> Iterator[tuple[int, Record]]:
    """Yield (end offset, record) up to the first incomplete or corrupt record."""
    at = 0
    for payload in payloads(data):
        at += _HEAD.size + len(payload)
        try:
            yield at, _decoder.decode(payload)
        except msgspec.MsgspecError:
            return


def _add(found: dict[int, Saved], message: Tokens) -> None:
    """Add a message from the engine to the progress of its outputs."""
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
