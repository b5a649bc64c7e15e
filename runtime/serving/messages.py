"""Messages between the HTTP front and the engine's process, as msgpack."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from ...conf.sampling import SamplingParams
from ..core.messages import TokenLogprobs
from ..core.run_record import FaultReason, FaultRecord
from ..ledger.causes import Cause
from ..ledger.compute_shares import ComputeShare

_NEWEST_FAULTS = 8
TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A request.

    Numbers rise from one to the next. `arrival` and `deadline`, of the first token, are in seconds on the clock that
    all processes of a node share. `output` are tokens that an engine before this one has sampled for it. A lower
    `priority` is more urgent.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    arrival: float
    user: str = ""
    cache_salt: str = ""
    deadline: float | None = None
    output: list[int] = []
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Ends requests now: nobody waits for them any more, or their text has come to a stop string."""

    numbers: list[int]


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Ends the engine and its ranks at once."""


class Watch(msgspec.Struct, frozen=True, array_like=True, tag="watch"):
    """Whether the front wants `LiveSpans`: somebody looks at the live page."""

    is_on: bool


class Record(msgspec.Struct, frozen=True, array_like=True, tag="record"):
    """Begins to record a window of the run, or ends it."""

    is_on: bool


class Starting(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """What the start is doing."""

    text: str


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The pipeline can take requests. `where`: node, process and device of each rank."""

    where: list[str]
    num_stages: int
    num_blocks: int


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """What a step of the coordinator came to, by column: the token of a request, -1 for an end without one.

    `reasons` and `logprobs` are by place in `numbers`. So are, with a request's first token, `dispatched`: when its
    first chunk went to the ranks, `cached`: the prompt tokens that were found in the prefix cache, if any, and
    `prompt_logprobs`: those of its prompt from the second token on. `time` is when the last stage's result came. Times
    are in seconds.
    """

    numbers: list[int]
    tokens: list[int]
    reasons: dict[int, str]
    logprobs: dict[int, TokenLogprobs]
    dispatched: dict[int, float]
    cached: dict[int, int]
    time: float
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}


class Recovery(msgspec.Struct, frozen=True, array_like=True):
    """The faults of a pipeline so far: how many are over, by reason, and their seconds, by part.

    `fault` is the one that is under repair, in words, and `since` its last sign of progress in seconds, None without
    such a fault. `newest` are the last few.
    """

    epoch: int = 0
    repaired: dict[FaultReason, int] = {}
    seconds: dict[str, float] = {}
    fault: str = ""
    since: float | None = None
    newest: list[FaultRecord] = []

    @classmethod
    def of(cls, faults: Sequence[FaultRecord]) -> Recovery:
        """Return the state after these faults."""
        if not faults:
            return cls()
        repaired: Counter[FaultReason] = Counter()
        seconds: defaultdict[str, float] = defaultdict(float)
        for fault in faults:
            if fault.up is not None:
                repaired[fault.reason] += 1
                for part, value in {"detect": fault.detected - fault.since, **fault.parts}.items():
                    seconds[part] += max(0.0, value)
        last = faults[-1]
        text, since = (last.text, last.since) if last.up is None else ("", None)
        return cls(last.epoch, dict(repaired), dict(seconds), text, since, list(faults[-_NEWEST_FAULTS:]))


class Slow(msgspec.Struct, frozen=True, array_like=True):
    """A stage that is slow now.

    It says since when (in seconds), how many times longer than usual its micro-batches take, and for how many seconds
    the other stages have waited for that.
    """

    stage: int
    since: float
    slowdown: float
    waited: float


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """The state of the engine, sent several times a second while it changes.

    `busy` and `idle` are seconds by stage since the first request came, `idle` by stage and then in the order of
    `CAUSES`. They end at `ends`, when each stage had computed its last micro-batch that is counted. `is_idle`: no
    request is there, and nothing in flight. `by_tokens` counts micro-batches by their tokens: up to each of
    `TOKEN_BOUNDS`, and above the last. `prefix_queries` are prompt tokens of the requests that have been admitted,
    `prefix_hits` those that were found in the prefix cache. `is_short_of_kv`: waiting requests wait for blocks, else
    for a slot. `slow_seconds` says by stage for how long it has been slow, all in all. `compute` is that of all
    micro-batches that are counted.
    """

    time: float
    running: int
    waiting: int
    kv_blocks_used: int
    tokens: int
    by_tokens: list[int]
    is_short_of_kv: bool
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    busy: list[float]
    idle: list[list[float]]
    ends: list[float]
    is_idle: bool
    recovery: Recovery = Recovery()
    slow: list[Slow] = []
    slow_seconds: list[float] = []
    compute: list[ComputeShare] = []

    @property
    def is_recovering(self) -> bool:
        """Whether the pipeline has failed and does not stand again."""
        return self.recovery.since is not None

    def idle_at(self, now: float) -> list[list[float]]:
        """Return `idle` with the waits that the ledger will count once they end: for a repair, or for a request."""
        rows = [list(row) for row in self.idle]
        since = self.recovery.since
        if since is not None or self.is_idle:
            cause = Cause.STARVED_NO_REQUEST if since is None else Cause.RECOVERY
            for row, end in zip(rows, self.ends, strict=True):
                row[cause.code] += max(0.0, now - (end if since is None else max(end, since)))
        return rows


class LiveSpans(msgspec.Struct, frozen=True, array_like=True, tag="spans"):
    """What the stages did since the last of these, for the live page.

    Times are in units of 10 µs from `origin`, in seconds.

    `prefill` and `decodes` are tokens by micro-batch, `begin` and `end` of its computation by stage and micro-batch.
    `idle_start`, `idle_end` and `cause`, an index into `CAUSES`, are by stage, an entry an idle interval. The
    `left_out` micro-batches before the first are too many to be sent.
    """

    origin: float
    first: int
    left_out: int
    prefill: list[int]
    decodes: list[int]
    begin: list[list[int]]
    end: list[list[int]]
    idle_start: list[list[int]]
    idle_end: list[list[int]]
    cause: list[list[int]]


class Recorded(msgspec.Struct, frozen=True, array_like=True, tag="recorded"):
    """A part of a window, encoded by `runtime/serving/recording.py`."""

    part: bytes
    is_last: bool


class Watched(msgspec.Struct, frozen=True, array_like=True, tag="watched"):
    """A part of a window that goes on for as long as somebody looks, encoded as `Recorded`."""

    part: bytes


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine cannot go on. `is_config`: the user can mend it."""

    error: str
    is_config: bool = False


ToEngine = Submit | Abort | Watch | Record | Shutdown
FromEngine = Starting | Started | Tokens | Snapshot | LiveSpans | Recorded | Watched | Failed

encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
