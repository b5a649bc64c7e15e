"""The causes of idle time, their meanings, and groups of causes."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why a stage was idle: the paper's three bubbles (section 3.2) first, then causes seen only in real pipelines."""

    PB1_PREFILL_SIZE = "pb1_prefill_size"
    PB2_PREFILL_DECODE = "pb2_prefill_decode"
    PB3_DECODE_CONTEXT = "pb3_decode_context"
    STAGE_IMBALANCE = "stage_imbalance"
    TRANSPORT = "transport"
    CONTROL = "control"
    CONTENTION = "contention"
    STARVED_NO_REQUEST = "starved_no_request"
    STARVED_IN_FLIGHT = "starved_in_flight"
    STARVED_KV_FULL = "starved_kv_full"
    UNKNOWN = "unknown"
    RECOVERY = "recovery"
    FILL_DRAIN = "fill_drain"

    @property
    def meaning(self) -> str:
        """A one-sentence description for users."""
        return _MEANINGS[self]

    @property
    def code(self) -> int:
        """The cause's index in `CAUSES`, used in arrays."""
        return _CODES[self]


_MEANINGS = {
    Cause.PB1_PREFILL_SIZE: "Consecutive micro-batches have different numbers of prefill tokens.",
    Cause.PB2_PREFILL_DECODE: "Of two consecutive micro-batches, one has prefill tokens and the other only decodes.",
    Cause.PB3_DECODE_CONTEXT: "Consecutive decode-only micro-batches have different context lengths.",
    Cause.STAGE_IMBALANCE: "Consecutive micro-batches are alike, but another stage took longer: uneven layers, LM "
    "head, prefix length, jitter.",
    Cause.TRANSPORT: "The activation was in transit from the upstream stage, or the stage was blocked by its own send. "
    "On a decode replica: all requests waited for KV transfers.",
    Cause.CONTROL: "Requests could run, but the coordinator had not dispatched the micro-batch, or its message was in "
    "transit.",
    Cause.CONTENTION: "Like transport or control, while the rank's threads waited for a CPU that ran other threads.",
    Cause.STARVED_NO_REQUEST: "There was no request.",
    Cause.STARVED_IN_FLIGHT: "All unfinished requests were in flight, each waiting for its token.",
    Cause.STARVED_KV_FULL: "Requests were waiting, but the KV cache was full.",
    Cause.UNKNOWN: "The imported trace does not record what is needed to determine the cause.",
    Cause.RECOVERY: "The pipeline was down after a fault: from its last progress until all stages ran again.",
    Cause.FILL_DRAIN: "Before the stage's first micro-batch of the run, or after its last.",
}

CAUSES = tuple(Cause)
UNEVEN_WORK = (  # removed by balancing micro-batches or stages
    Cause.PB1_PREFILL_SIZE,
    Cause.PB2_PREFILL_DECODE,
    Cause.PB3_DECODE_CONTEXT,
    Cause.STAGE_IMBALANCE,
)
STARVED = (Cause.STARVED_NO_REQUEST, Cause.STARVED_IN_FLIGHT, Cause.STARVED_KV_FULL)
BUBBLES = (
    *UNEVEN_WORK,
    Cause.TRANSPORT,
    Cause.CONTROL,
    Cause.CONTENTION,
)  # all idle time except starved, unknown, recovery, fill and drain
DELAYS_FROM_OUTSIDE = (  # they propagate down the pipeline with a micro-batch
    Cause.TRANSPORT,
    Cause.CONTROL,
    *STARVED,
    Cause.UNKNOWN,
)

_CODES = {cause: code for code, cause in enumerate(CAUSES)}
