"""vLLM's iteration log, read and laid beside the trace of the same run.

`recorded/vllm_iterations.log` is what vLLM 0.32.0's CPU build wrote over two stages (`benchmarks.vllm_trace`, workload
mixed, seed 0), without its lines about files and addresses; `recorded/vllm_steps.csv` are the steps of both ranks from
the torch profiler's traces of that run, which began with iteration 33.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.errors import ConfigError
from gapless.runtime.ledger.causes import Cause
from gapless.runtime.ledger.ledger import Ledger
from gapless.runtime.traces.iterations_of_steps import name_steps
from gapless.runtime.traces.log_run import run_of_log
from gapless.runtime.traces.rank_trace import RankTrace, Step
from gapless.runtime.traces.vllm_log import Iteration, iteration_times, read_iterations, taut_string
from tests.support.tiers import examples

RECORDED = Path(__file__).parent / "recorded"
LOG = RECORDED / "vllm_iterations.log"
FIRST_TRACED = 33


def recorded_steps() -> list[list[Step]]:
    """Return the steps of both ranks, with the tokens that the trace says."""
    steps: list[list[Step]] = [[], []]
    with (RECORDED / "vllm_steps.csv").open() as file:
        for row in csv.DictReader(file):
            tokens = {"prefill_tokens": int(row["prefill_tokens"]), "decode_tokens": int(row["decode_tokens"])}
            steps[int(row["stage"])].append(Step(float(row["begin"]), float(row["end"]), **tokens))
    return steps


def bare(steps: list[Step]) -> list[Step]:
    return [Step(step.start, step.end) for step in steps]


def test_recorded_log_is_read_whole() -> None:
    iterations = read_iterations(LOG)
    assert [iteration.index for iteration in iterations] == list(range(100))
    traced = [(step.prefill_tokens, step.decode_tokens) for step in recorded_steps()[0]]
    assert [(i.prefill_tokens, i.decode_tokens) for i in iterations[FIRST_TRACED:]] == traced
    assert iterations[0].elapsed == pytest.approx(0.10915)


def test_times_of_the_log_fit_the_trace() -> None:
    """What the log leaves open is no more than it says, and the traced ends lie within."""
    iterations = read_iterations(LOG)
    begin, end, off = iteration_times(iterations)
    assert off < 1.0
    assert (begin[1:] >= end[:-1] - 1e-9).all()
    assert (end - begin) == pytest.approx([iteration.elapsed for iteration in iterations])
    traced = np.array([step.end for step in recorded_steps()[1]])
    shift = end[FIRST_TRACED:] - traced
    assert np.ptp(shift) <= 2 * off


def test_log_names_the_steps_of_a_trace_that_says_no_tokens() -> None:
    traces = [RankTrace(f"rank{rank}", rank, rank, steps=bare(steps)) for rank, steps in enumerate(recorded_steps())]
    assert name_steps(traces, read_iterations(LOG)) == [
        "vLLM's log names the tokens of the steps: they are its iterations 33 to 99"
    ]
    for trace, steps in zip(traces, recorded_steps(), strict=True):
        named = [(step.prefill_tokens, step.decode_tokens) for step in trace.steps]
        assert named == [(step.prefill_tokens, step.decode_tokens) for step in steps]
        assert [(step.start, step.end) for step in trace.steps] == [(step.start, step.end) for step in steps]


@pytest.mark.parametrize(("count", "found"), [(8, 0.3), (16, 0.6), (26, 0.8)])
def test_a_part_of_a_trace_finds_its_place(count: int, found: float) -> None:
    """Wherever it begins; where equal decodes leave two places as likely, none is chosen, and never a wrong one."""
    iterations, steps = read_iterations(LOG), recorded_steps()
    firsts = range(len(steps[0]) - count + 1)
    right = 0
    for first in firsts:
        part = [bare(own[first : first + count]) for own in steps]
        traces = [RankTrace(f"rank{rank}", rank, rank, steps=own) for rank, own in enumerate(part)]
        (line,) = name_steps(traces, iterations)
        assert "nowhere" in line or f"iterations {FIRST_TRACED + first} to" in line
        right += "nowhere" not in line
    assert right >= found * len(firsts)


def test_steps_with_tokens_are_left_alone() -> None:
    steps = recorded_steps()[0]
    trace = RankTrace("rank0", 0, 0, steps=list(steps))
    assert name_steps([trace], read_iterations(LOG)[:50]) == []
    assert trace.steps == steps


def test_a_log_of_another_run_names_nothing() -> None:
    steps = [Step(0.7 * i, 0.7 * i + 0.5) for i in range(30)]
    trace = RankTrace("rank0", 0, 0, steps=list(steps))
    (line,) = name_steps([trace], read_iterations(LOG))
    assert "nowhere" in line
    assert trace.steps == steps


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.floats(0.0, 0.4), st.floats(0.001, 0.9)), min_size=1, max_size=30), st.floats(0.0, 1.0))
def test_true_times_lie_within_what_is_said(work: list[tuple[float, float]], phase: float) -> None:
    """Each iteration after a pause, its end cut to whole seconds: its true end is off by no more than is said."""
    now, ends, iterations = 1000.0 + phase, [], []
    for index, (pause, elapsed) in enumerate(work):
        now += pause + elapsed
        ends.append(now)
        iterations.append(Iteration(0, index, float(int(now)), 1.0, elapsed, 0, 0, 1, 1))
    begin, end, off = iteration_times(iterations)
    shift = np.array(ends) - end  # the same for all, were all known
    assert np.ptp(shift) <= 2 * off + 1e-9
    assert (begin[1:] >= end[:-1] - 1e-9).all()


def test_lines_of_other_versions(tmp_path: Path) -> None:
    """Lines of vLLM 0.14 come from the engine's process; others have colors, prefixes, parts of seconds, dummies."""
    what = (
        "1 context requests, 9 context tokens, 2 generation requests, 3 generation tokens, "
        "iteration elapsed time: 4.50 ms"
    )
    cache = "GPU KV cache usage: 0.1%"
    log = tmp_path / "serve.log"
    log.write_text(
        f"(EngineCore_DP0 pid=7) INFO 12-31 23:59:59 [core.py:359] Iteration(0): {what}\n"
        f"\x1b[32mINFO\x1b[0m 01-01 00:00:01,250 [loggers.py:182] Engine 000: Iteration(1): {what}, {cache}\n"
        f"pod/vllm-0 INFO 01-01 00:00:02 [loggers.py:199] Engine 000: Iteration(2): {what} (dummy), {cache}\n"
        f"INFO 01-01 00:00:02 [loggers.py:199] Engine 001: Iteration(7): {what}, {cache}\n"
    )
    iterations = read_iterations(log)
    assert [i.index for i in iterations] == [0, 1]
    assert {(i.prefill_tokens, i.decode_requests, i.decode_tokens) for i in iterations} == {(9, 2, 3)}
    assert iterations[1].logged - iterations[0].logged == pytest.approx(2.25)
    assert [i.resolution for i in iterations] == [1.0, pytest.approx(1e-3)]


WHAT = (
    "0 context requests, 0 context tokens, 4 generation requests, 4 generation tokens, "
    "iteration elapsed time: 200.00 ms"
)


def two_engines(folder: Path, form: str, name: str = "serve.log") -> Path:
    """Write 20 iterations of each of two engines in turn, as a way of logging has them."""
    lines = []
    for index in range(20):
        for engine in (0, 1):
            second = f"{10 + index // 4:02d}"
            usual = f"INFO 11-24 23:23:{second} [core.py:311] Iteration({index}): {WHAT}"
            colored = f"\x1b[0;36m(EngineCore_DP{engine} pid={700 + engine})\x1b[0;0m {usual}"
            fine = f"2025-11-24T23:23:{second}.{index % 4}00000001Z"
            lines.append(
                {
                    "number": usual.replace("Iteration", f"Engine {engine:03d}: Iteration"),
                    "process": colored,
                    "process id": f"(EngineCore pid={700 + engine}) {usual}",
                    "docker": f"{fine} {colored}",
                    "compose": f"vllm-{engine}  | {usual}",
                    "kubernetes": f"[pod/vllm-{engine}/server] {fine} {usual}",
                    "container": f"{fine} stderr F {colored}",
                    "json": json.dumps({"log": f"{colored}\n", "stream": "stderr", "time": fine}),
                    "json message": json.dumps(
                        {"time": fine, "message": f"Engine {engine:03d}: Iteration({index}): {WHAT}"}
                    ),
                }[form]
            )
    text = "\n".join(lines)
    (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    return folder / name


FINE = ("docker", "kubernetes", "container", "json", "json message")


@pytest.mark.parametrize("form", ["number", "process", "process id", "compose", *FINE])
def test_of_two_engines_in_one_log_one_is_read_and_the_other_named(form: str, tmp_path: Path) -> None:
    notes: list[str] = []
    iterations = read_iterations(two_engines(tmp_path, form), notes)
    assert [iteration.index for iteration in iterations] == list(range(20))
    assert iterations[-1].logged - iterations[0].logged == pytest.approx(4.3 if form in FINE else 4.0)
    assert iterations[0].resolution == pytest.approx(1e-9 if form in FINE else 1.0)
    (note,) = notes
    assert note.startswith("serve.log: 20 of 40 iterations are left out, of engines other than engine 0")
    assert note in run_of_log([tmp_path]).record.notes


@pytest.mark.parametrize("name", ["vllm.log.gz", "VLLM.LOG", "vllm.log.1", "vllm.jsonl", "vllm.err"])
def test_a_log_in_a_folder_is_found_and_others_are_named(name: str, tmp_path: Path) -> None:
    two_engines(tmp_path, "process", name)
    (tmp_path / "short.txt").write_text(f"INFO 11-24 23:23:10 [core.py:311] Iteration(0): {WHAT}")
    notes = run_of_log([tmp_path]).record.notes
    assert f"{name} is the log with the most iterations; left out: short.txt." in notes


def test_an_iteration_without_a_date_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "serve.log").write_text(f'start\n{{"ts": 1763.5, "msg": "Iteration(0): {WHAT}"}}')
    with pytest.raises(ConfigError, match=r"serve\.log:2: an iteration without its date and time"):
        run_of_log([tmp_path])


def test_the_longest_run_of_a_log_counts(tmp_path: Path) -> None:
    lines = LOG.read_text().splitlines()[2:]
    log = tmp_path / "serve.log"
    log.write_text("\n".join([*lines[:5], *lines]))
    notes: list[str] = []
    assert len(read_iterations(log, notes)) == 100
    assert notes == ["serve.log: 5 of 105 iterations are left out, of other runs of the server."]


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 2.0)), min_size=1, max_size=12), st.integers(0, 2**31))
def test_taut_string_is_the_shortest_line(tube: list[tuple[float, float]], seed: int) -> None:
    """Within the tube, and no line of it has less of squared steps; found beside one of many small corrections."""
    low = np.cumsum([step for step, _ in tube])
    high = np.maximum.accumulate(low + [width for _, width in tube])
    line = taut_string(low, high)
    assert (line >= low - 1e-9).all()
    assert (line <= high + 1e-9).all()
    energy = float((np.diff(line) ** 2).sum())
    random = np.random.default_rng(seed)
    for _ in range(50):
        other = np.clip(line + random.normal(0.0, 0.3, len(line)), low, high)
        other[[0, -1]] = line[[0, -1]]
        assert float((np.diff(other) ** 2).sum()) >= energy - 1e-9


def test_alone_it_is_a_run_of_one_lane(tmp_path: Path) -> None:
    (tmp_path / "serve.log").write_text(LOG.read_text())
    record = run_of_log([tmp_path]).record
    assert record.num_stages == 1
    elapsed = [iteration.elapsed for iteration in read_iterations(LOG)]
    assert [span.end - span.begin for span in record.spans] == pytest.approx(elapsed)
    assert re.search(r"may be off by \d+ ms", "".join(record.notes))
    ledger = Ledger(record)
    ledger.check()
    idle = {cause: seconds for cause, seconds in ledger.seconds_by_cause().items() if seconds}
    assert set(idle) == {Cause.CONTROL, Cause.UNKNOWN}
    assert f"{idle[Cause.UNKNOWN]:.3f} s of idle time lie near" in record.notes[-1]
    first_prompts = record.spans[FIRST_TRACED].begin  # nobody knows when they came
    near = [i for i in ledger.idle if abs(i.end - first_prompts) < 0.1]
    assert {i.cause for i in near} == {Cause.UNKNOWN}


def test_a_log_without_iterations_is_refused_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("INFO 01-01 00:00:00 [loggers.py:1] Engine 000: Avg prompt throughput: 0.0 tokens/s\n")
    with pytest.raises(ConfigError, match="--enable-logging-iteration-details"):
        read_iterations(log)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_iterations(tmp_path / "none.log")
