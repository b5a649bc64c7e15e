"""Traces of a pipeline of two ranks whose every wait is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from gapless.runtime.analysis.traces.rank_trace import RankTrace, Step, Transfer, merged


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


def ranks_of(
    seconds: list[list[float]],
    prefill: list[int],
    *,
    transfer: float = 0.001,
    late: float = 0.0,
    depth: int = 0,
    is_async: bool = False,
) -> list[RankTrace]:
    """Play a pipeline of ranks that take `seconds` [stages][micro-batches].

    A send and its receive end together and hold both ranks, as in `two_ranks`. With `is_async` a send holds nobody, and
    a link carries one activation at a time. A micro-batch of `depth` in flight waits for a slot; 0: for none.
    """
    traces = [RankTrace(f"rank{rank}", rank, rank, engine="vLLM") for rank in range(len(seconds))]
    free, over, done = [0.0] * len(seconds), [0.0] * len(seconds), []
    for number, prompt in enumerate(prefill):
        at = max(free[0], done[number - depth] if 0 < depth <= number else 0.0) + late
        for stage, trace in enumerate(traces):
            if stage:
                start, stood = traces[stage - 1].steps[-1].end, free[stage]
                at = over[stage] = max(start, over[stage] if is_async else stood) + transfer
                traces[stage - 1].sends.append(Transfer(start, at, stage, 4096))
                at = max(at, stood)
                trace.receives.append(Transfer(stood, at, stage - 1, 4096))
                free[stage - 1] = start if is_async else at
            end = free[stage] = at + seconds[stage][number]
            trace.steps.append(Step(at, end, f"execute {number}", int(prompt > 0), prompt, 0, 4, 4, 9))
        done.append(free[-1])
    for trace in traces:
        trace.computes = merged([step.start for step in trace.steps], [step.end for step in trace.steps])
    return traces
