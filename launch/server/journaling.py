"""The journal in use: what the front writes to it, and the requests that it has taken up again."""

from __future__ import annotations

import logging
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
MOST_KEPT = 1000  # answers that nobody has fetched
_PREFIXES = ("", "cmpl-", "chatcmpl-", "resp_", "msg_")

Key = tuple[str, str, str]  # of a request: its path, the mark of its key, its id


@dataclass(frozen=True, slots=True)
class _Unsettled:
    accepted: Accepted
    call: Call
    progress: Callable[[], Iterable[Progress]]  # of its outputs, now


class Journaling:
    """Writes requests and tokens to a journal. Where it cannot be written any more, the server goes on without."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._is_written = True
        self._unsettled: dict[Key, _Unsettled] = {}
        self._resumed: dict[Key, Resumed] = {}

    def check_new(self, path: str, owner: str, id: str) -> None:
        """Check that a request's id is not that of another one.

        Raises:
            ApiError: it is.
        """
        key = path, owner, id
        if key in self._resumed:
            raise ApiError(409, f"X-Request-Id: {id} was taken up from the journal; GET {path}/{id}")
        if key in self._unsettled:
            raise ApiError(409, f"X-Request-Id: {id} is that of a request that has not ended yet")

    def accept(self, accepted: Accepted, asked: Asked, call: Call) -> None:
        """Write a request that the engine has got. It leaves the journal when its call is settled."""
        key = accepted.path, accepted.owner, accepted.id
        self._unsettled[key] = _Unsettled(accepted, call, lambda: progress_of(accepted, asked, call))
        call.on_settled = lambda: self.settle(key)
        self._write(lambda: self._journal.write(accepted))

    def take_tokens(self, message: Tokens, payload: bytes) -> None:
        """Write a message of the engine's tokens, as it came."""
        if self._unsettled:
            self._write(lambda: self._journal.write_encoded(payload))

    def settle(self, key: Key) -> None:
        """Note that the client of a request has its answer, or wants none."""
        if (unsettled := self._unsettled.pop(key, None)) is not None:
            self._write(lambda: self._journal.write(Settled(unsettled.accepted.numbers)))

    def resume(self, accepted: Accepted, call: Call, progress: Callable[[], Iterable[Progress]]) -> Resumed:
        """Take up a request of the journal again; `begin` writes it."""
        key = accepted.path, accepted.owner, accepted.id
        self._unsettled[key] = _Unsettled(accepted, call, progress)
        self._resumed[key] = resumed = Resumed()
        return resumed

    def begin(self) -> None:
        """Write the journal anew, with what was taken up of it and the newest answers that nobody has fetched."""
        ended = [key for key in self._resumed if self._unsettled[key].call.finished]
        for key in ended[:-MOST_KEPT]:
            del self._resumed[key], self._unsettled[key]
        self._write(lambda: self._journal.compact(self._records()))

    def find(self, path: str, owner: str, id: str) -> tuple[Key, Resumed] | None:
        """Return the resumed request of an id, which may lack the prefix of its kind; with it the key, for `settle`."""
        keys = ((path, owner, prefix + id) for prefix in _PREFIXES)
        return next(((key, self._resumed[key]) for key in keys if key in self._resumed), None)

    def close(self) -> None:
        """Write no more; what is unsettled is for the next server."""
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
            text = "%s=%s: %s; the server goes on without a journal"
            _log.warning(text, KEY, self._journal.path, reason(error))

    def _records(self) -> Iterator[Record]:
        for each in self._unsettled.values():
            yield each.accepted
            yield from each.progress()


def progress_of(accepted: Accepted, asked: Asked, call: Call) -> Iterator[Progress]:
    """Yield what the outputs of a call have got so far."""
    params = asked.params
    for number, (prompt, _), output in zip(accepted.numbers, asked.outputs, call.outputs, strict=True):
        found = zip(output.token_ids, output.logprobs or (), strict=False)
        logprobs = [unnamed(token, each, params.logprobs or 0) for token, each in found]
        of_prompt = call.prompt_logprobs.get(output.index)
        prompts = None
        if of_prompt is not None:
            pairs = zip(prompt, of_prompt, strict=True)
            prompts = [unnamed(token, each, params.prompt_logprobs or 0) for token, each in pairs if each is not None]
        # A stop string is found in the text again.
        reason = None if isinstance(output.stop_reason, str) else output.finish_reason
        yield Progress(number, output.token_ids, logprobs, prompts, output.cached_tokens, reason)
