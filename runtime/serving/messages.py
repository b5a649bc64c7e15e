"""Messages between the HTTP front end and the engine process, as msgpack."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from ...conf.sampling import SamplingParams
from ..core.compute_share import ComputeShare
from ..core.messages import TokenLogprobs
from ..core.run_record import FaultReason, FaultRecord

_NEWEST_FAULTS = 8
TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A request.

    Numbers increase. `arrival` and `deadline` (of the first token) are in seconds on the clock that all processes of a
    node share. `output`: tokens already sampled by an earlier engine. A lower `priority` is more urgent.
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
    """Aborts or finishes requests immediately, on client disconnect or a stop string."""

    numbers: list[int]


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Shuts down the engine and its ranks immediately."""


class Watch(msgspec.Struct, frozen=True, array_like=True, tag="watch"):
    """Turns `LiveSpans` on or off. They are needed while somebody views the live page."""

    is_on: bool


class Record(msgspec.Struct, frozen=True, array_like=True, tag="record"):
    """Starts or stops recording a window of the run."""

    is_on: bool


class Starting(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Startup progress."""

    text: str


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The pipeline is ready for requests. `where`: node, process and device of each rank."""

    where: list[str]
    num_stages: int
    num_blocks: int


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """The results of a coordinator step, by column: one token per request, -1 for an end without a token.

    The dicts are keyed by index in `numbers`. `reasons` are finish reasons. Sent with a request's first token:
    `dispatched`, when its first chunk was sent to the ranks; `cached`, its prompt tokens found in the prefix cache, if
    any; `prompt_logprobs`, for all prompt tokens but the first. `time` is when the last stage's result arrived. Times
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
    """The faults of a pipeline so far: repaired faults by reason, and their seconds by repair phase.

    `fault` describes the fault under repair, and `since` is the last sign of progress before it, in seconds; None
    without such a fault. `newest` are the last few faults.
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
    """A stage that is currently slow.

    `since` is in seconds. `slowdown`: how many times longer than usual its micro-batches take. `waited`: seconds that
    the other stages have waited because of it.
    """

    stage: int
    since: float
    slowdown: float
    waited: float


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """The state of the engine, sent several times a second while it changes.

    `is_idle`: there are no requests, and nothing is in flight. `prefix_queries` are prompt tokens of admitted requests,
    `prefix_hits` those found in the prefix cache. `is_short_of_kv`: waiting requests wait for blocks, else for a slot.

    An observer adds the rest, over completed micro-batches. `tokens` is their total, `by_tokens` a histogram of their
    sizes with upper bounds `TOKEN_BOUNDS` and an overflow bucket. `busy` and `idle` are seconds per stage since the
    first request arrived; `idle` is also split by `CAUSES`, in order. They extend to `ends`, when each stage finished
    its last counted micro-batch. `slow_seconds`: total seconds that each stage was slow. `compute`: utilization over
    these micro-batches.
    """

    time: float
    running: int
    waiting: int
    kv_blocks_used: int
    is_short_of_kv: bool
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    is_idle: bool
    recovery: Recovery = Recovery()
    tokens: int = 0
    by_tokens: list[int] = []
    busy: list[float] = []
    idle: list[list[float]] = []
    ends: list[float] = []
    slow: list[Slow] = []
    slow_seconds: list[float] = []
    compute: list[ComputeShare] = []

    @property
    def is_recovering(self) -> bool:
        """Whether the pipeline has failed and is not restored yet."""
        return self.recovery.since is not None


class LiveSpans(msgspec.Struct, frozen=True, array_like=True, tag="spans"):
    """The stages' activity since the last `LiveSpans`, for the live page.

    Times are in units of 10 µs from `origin`, which is in seconds.

    `prefill` and `decodes` are tokens per micro-batch, `begin` and `end` of its computation by stage and micro-batch.
    `idle_start`, `idle_end` and `cause` (an index into `CAUSES`) are by stage, one entry per idle interval. `left_out`
    micro-batches before `first` were omitted because there were too many to send.
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
    """A part of a recorded window, as encoded by the observer."""

    part: bytes
    is_last: bool


class Watched(msgspec.Struct, frozen=True, array_like=True, tag="watched"):
    """A part of an unbounded window, sent while somebody watches, encoded as `Recorded`."""

    part: bytes


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Fatal engine error. `is_config`: caused by the user's configuration."""

    error: str
    is_config: bool = False


ToEngine = Submit | Abort | Watch | Record | Shutdown
FromEngine = Starting | Started | Tokens | Snapshot | LiveSpans | Recorded | Watched | Failed

encoder = msgspec.msgpack.Encoder()
to_engine = msgspec.msgpack.Decoder(ToEngine)
from_engine = msgspec.msgpack.Decoder(FromEngine)
