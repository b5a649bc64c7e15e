"""Traces of a pipeline of two ranks whose every wait is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from gapless.runtime.traces.rank_trace import RankTrace, Step, Transfer, merged


@dataclass(frozen=True)
class MicroBatch:
    """Seconds: of compute on both stages, of the transfer, and until the engine dispatches it once stage 0 is free."""

    first: float
    second: float
    transfer: float
    late: float
    prefill: int
    decodes: int


@dataclass(frozen=True)
class Handover:
    """What must come out: when the receiver stood, when the sender did, and the transfer's seconds."""

    received_from: float
    sent_from: float
    transfer: float

    @property
    def wait(self) -> float:
        return max(0.0, self.sent_from - self.received_from)


def milliseconds(least: int, most: int) -> st.SearchStrategy[float]:
    return st.integers(least, most).map(lambda count: count / 1000)


micro_batches = st.lists(
    st.builds(
        MicroBatch,
        milliseconds(1, 50),
        milliseconds(1, 50),
        milliseconds(1, 5),
        milliseconds(0, 30),
        st.integers(0, 64),
        st.integers(1, 8),
    ),
    min_size=1,
    max_size=12,
)


def two_ranks(work: list[MicroBatch]) -> tuple[list[RankTrace], list[Handover]]:
    """Play the pipeline: a send and its receive end together, `transfer` after both stand, and hold both ranks."""
    traces = [RankTrace(f"rank{rank}", rank, rank, engine="vLLM") for rank in range(2)]
    computes: list[list[tuple[float, float]]] = [[], []]
    handovers = []
    free = [0.0, 0.0]
    for number, one in enumerate(work):
        label = f"execute {number}"
        begin = free[0] + one.late
        prompts, rows = int(one.prefill > 0), one.decodes
        step = Step(begin, begin + one.first, label, prompts, one.prefill, 0, rows, rows, 9)
        computes[0].append((step.start, step.end))
        over = max(step.end, free[1]) + one.transfer
        handovers.append(Handover(free[1], step.end, one.transfer))
        traces[0].steps.append(step)
        traces[0].sends.append(Transfer(step.end, over, 1, 4096))
        traces[1].receives.append(Transfer(free[1], over, 0, 4096))
        traces[1].steps.append(replace(step, start=over, end=over + one.second))
        computes[1].append((over, over + one.second))
        free = [over, over + one.second]
    for trace, own in zip(traces, computes, strict=True):
        trace.computes = merged([start for start, _ in own], [end for _, end in own])
    return traces, handovers
