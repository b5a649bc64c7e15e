"""The causes of idle time, what they mean, and the groups that they form."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why a stage was idle: the paper's three bubbles (section 3.2) first, then what only a real pipeline shows."""

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
        """One sentence for people."""
        return _MEANINGS[self]

    @property
    def code(self) -> int:
        """Its index in `CAUSES`, by which arrays name it."""
        return _CODES[self]


_MEANINGS = {
    Cause.PB1_PREFILL_SIZE: "The stage waited for a micro-batch with another number of prefill tokens than its last.",
    Cause.PB2_PREFILL_DECODE: "Of the micro-batch that the stage waited for and its last, only one carried prefill.",
    Cause.PB3_DECODE_CONTEXT: "The stage waited for decodes over another context length than its last decodes'.",
    Cause.STAGE_IMBALANCE: "The stage waited for a micro-batch like its last, which yet took longer elsewhere: "
    "uneven layers, LM head, prefix length, jitter.",
    Cause.TRANSPORT: "The upstream stage had finished, and the activation was under way; or the stage was held up by "
    "its own send; or all requests of a decode replica waited for their KV, which was under way or next on the link.",
    Cause.CONTROL: "Work was admissible, but the coordinator had not dispatched it yet, or its message was under way.",
    Cause.CONTENTION: "As transport or control, while the rank's threads waited for a processor that others had.",
    Cause.STARVED_NO_REQUEST: "No request was there to work on.",
    Cause.STARVED_IN_FLIGHT: "Every request with work left was already in flight, waiting for its token.",
    Cause.STARVED_KV_FULL: "Requests waited, but the KV cache had no room for them.",
    Cause.UNKNOWN: "The run was read from another engine's trace, which does not say what this cause would need.",
    Cause.RECOVERY: "The pipeline had failed: from its last sign of progress until all stages ran again.",
    Cause.FILL_DRAIN: "Before the stage's first and after its last micro-batch of the run.",
}

CAUSES = tuple(Cause)
UNEVEN_WORK = (  # more even micro-batches or stages remove them
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
)  # idle time without starved, unknown, recovery, fill and drain
DELAYS_FROM_OUTSIDE = (  # they come down the pipeline with a micro-batch
    Cause.TRANSPORT,
    Cause.CONTROL,
    *STARVED,
    Cause.UNKNOWN,
)

_CODES = {cause: code for code, cause in enumerate(CAUSES)}
