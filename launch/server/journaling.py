"""Runtime use of the journal: what the front writes to it, and the requests resumed from it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ...conf.errors import reason
from ...runtime.engine.output_text import unnamed
from ...runtime.serving.journal import KEY, Accepted, Journal, Progress, Record, Settled
from ...runtime.serving.messages import Tokens
from .answers import Asked
from .engine_client import Call
from .errors import ApiError
from .resumed import Resumed

_log = logging.getLogger(__name__)
MOST_KEPT = 1000  # answers not fetched yet

Key = tuple[str, str, str]  # path, key mark and id of a request


@dataclass(frozen=True, slots=True)
class _Unsettled:
    accepted: Accepted
    call: Call
    progress: Callable[[], Iterable[Progress]]  # current progress of its outputs


class Journaling:
    """Writes requests and tokens to a journal. If writing fails, the server continues without a journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._is_written = True
        self._unsettled: dict[Key, _Unsettled] = {}
        self._resumed: dict[Key, Resumed] = {}

    def check_new(self, path: str, owner: str, id: str) -> None:
        """Check that a request's id is not in use.

        Raises:
            ApiError: another request has it.
        """
        key = path, owner, id
        if key in self._resumed:
            raise ApiError(409, f"X-Request-Id: {id} was resumed from the journal; use GET {path}/{id}")
        if key in self._unsettled:
            raise ApiError(409, f"X-Request-Id: {id} is in use by an unfinished request")

    def accept(self, accepted: Accepted, asked: Asked, call: Call) -> None:
        """Write a submitted request. It is removed from the journal when its call is settled."""
        key = accepted.path, accepted.owner, accepted.id
        self._unsettled[key] = _Unsettled(accepted, call, lambda: progress_of(accepted, asked, call))
        call.on_settled = lambda: self.settle(key)
        self._write(lambda: self._journal.write(accepted))

    def take_tokens(self, message: Tokens, payload: bytes) -> None:
        """Write an encoded message of tokens from the engine."""
        if self._unsettled:
            self._write(lambda: self._journal.write_encoded(payload))

    def settle(self, key: Key) -> None:
        """Record that the client of a request has its answer or has left."""
        if (unsettled := self._unsettled.pop(key, None)) is not None:
            self._write(lambda: self._journal.write(Settled(unsettled.accepted.numbers)))

    def resume(self, accepted: Accepted, call: Call, progress: Callable[[], Iterable[Progress]]) -> Resumed:
        """Register a request resumed from the journal; `begin` writes it."""
        key = accepted.path, accepted.owner, accepted.id
        self._unsettled[key] = _Unsettled(accepted, call, progress)
        self._resumed[key] = resumed = Resumed()
        return resumed

    def begin(self) -> None:
        """Rewrite the journal with the resumed requests and the newest unfetched answers."""
        ended = [key for key in self._resumed if self._unsettled[key].call.finished]
        for key in ended[:-MOST_KEPT]:
            del self._resumed[key], self._unsettled[key]
        self._write(lambda: self._journal.compact(self._records()))

    def find(self, path: str, owner: str, id: str) -> tuple[Key, Resumed] | None:
        """Return the resumed request with this id, prefixed or not, and its key for `settle`."""
        named = re.compile(rf"([a-z]+[-_])?{re.escape(id)}")  # each API has its own prefix, such as `chatcmpl-`
        keys = (key for key in self._resumed if key[:2] == (path, owner) and named.fullmatch(key[2]))
        return next(((key, self._resumed[key]) for key in keys), None)

    def close(self) -> None:
        """Stop writing; unsettled requests are left for the next server."""
        self._is_written = False
        self._journal.close()

    def _write(self, write: Callable[[], None]) -> None:
        if not self._is_written:
            return
        try:
            write()
            if self._journal.is_large:
                self._journal.compact(self._records())
        except OSError as error:
            self._is_written = False
            text = "%s=%s: %s; continuing without a journal"
            _log.warning(text, KEY, self._journal.path, reason(error))

    def _records(self) -> Iterator[Record]:
        for each in self._unsettled.values():
            yield each.accepted
            yield from each.progress()


def progress_of(accepted: Accepted, asked: Asked, call: Call) -> Iterator[Progress]:
    """Yield the progress of a call's outputs."""
    params = asked.params
    for number, (prompt, _), output in zip(accepted.numbers, asked.outputs, call.outputs, strict=True):
        found = zip(output.token_ids, output.logprobs or (), strict=False)
        logprobs = [unnamed(token, each, params.logprobs or 0) for token, each in found]
        of_prompt = call.prompt_logprobs.get(output.index)
        prompts = None
        if of_prompt is not None:
            pairs = zip(prompt, of_prompt, strict=True)
            prompts = [unnamed(token, each, params.prompt_logprobs or 0) for token, each in pairs if each is not None]
        # On resume, a stop string is found in the text again.
        reason = None if isinstance(output.stop_reason, str) else output.finish_reason
        yield Progress(number, output.token_ids, logprobs, prompts, output.cached_tokens, reason)
