"""Faults on a run's page and in the terminal."""

from __future__ import annotations

from gapless.runtime.analysis.ledger.recovery import fault_summary
from gapless.runtime.analysis.report.faults_section import (
    fault_lines,
    faults_section,
    straggler_lines,
    stragglers_section,
)
from gapless.runtime.core.run_record import FaultRecord

PARTS = {"stop": 0.5, "start": 2.0, "rendezvous": 0.25, "weights": 1.0}
REPAIRED = FaultRecord(1, "process", "rank 1 ended with <9>", 112.0, 112.75, 117.0, PARTS, [1, 3], 6, 1234)
OPEN = FaultRecord(2, "hang", "no result for 60 s", 130.0, 190.0)
FAULTS = [fault_summary(REPAIRED, 100.0, 1.5), fault_summary(OPEN, 100.0)]


def test_a_run_without_faults_has_no_section() -> None:
    assert faults_section([]) == ""
    assert fault_lines({"faults": []}) == fault_lines({}) == []


def test_the_section_has_a_row_for_each_fault() -> None:
    section = faults_section(FAULTS)
    assert section.count("<tr>") == 3
    assert "<th>12.000 s</th>" in section
    texts = ("process", "rank 1 ended with &lt;9&gt;", "1, 3", "1,234", "5.00 s", "1.50 s", "never", "-")
    for text in texts:
        assert f"<td>{text}</td>" in section, text


def test_the_parts_of_a_fault_sum_to_it() -> None:
    parts = "detect 750 ms, stop 500 ms, start 2.00 s, rendezvous 250 ms, weights 1.00 s, rest 500 ms"
    assert f'<td class="text">{parts}</td>' in faults_section(FAULTS)
    assert '<td class="text">detect 60.00 s</td>' in faults_section(FAULTS)


def test_the_terminal_has_a_line_for_each_fault() -> None:
    assert fault_lines({"faults": FAULTS}) == [
        "fault at 12.00 s (process): rank 1 ended with <9>; recovered in 5.00 s, 6 requests and 1,234 tokens computed "
        "again in 1.50 s",
        "fault at 30.00 s (hang): no result for 60 s; not recovered, 0 requests and 0 tokens computed again",
    ]


def test_many_faults_are_cut_short_in_the_terminal() -> None:
    faults = [FAULTS[0]] * 1045
    *lines, rest = fault_lines({"faults": faults, "recovery_seconds": 5225.0})
    assert lines == fault_lines({"faults": FAULTS[:1]}) * 10
    assert rest == "and 1,035 more; all faults together lasted 5,225.00 s"
    assert faults_section(faults).count("<tr>") == 1046


def test_stragglers_have_a_line_each() -> None:
    one = {"stage": 1, "start": 12.0, "end": 15.5, "slowdown": 2.34, "waited": 4.2}
    line = "stage 1 computed 2.3 times as long as usual from 12.00 s to 15.50 s; the others waited 4.20 s for it"
    assert straggler_lines({"stragglers": [one]}) == [line]
    assert f"<li>{line}</li>" in stragglers_section({"stragglers": [one]})
    assert straggler_lines({}) == []
    assert stragglers_section({"stragglers": []}) == ""
    assert straggler_lines({"stragglers": [one] * 30})[-1] == "and 20 more times, for which others waited 84.00 s"


def test_a_repair_that_met_the_next_fault_says_so() -> None:
    met = fault_summary(FaultRecord(1, "process", "rank 1 died", 112.0, 112.5, 114.0), 100.0)
    assert "<td>the next fault came after 2.00 s</td>" in faults_section([met])
    (line,) = fault_lines({"faults": [{**met, "replica": 3}]})
    assert line.startswith("fault of replica 3 at 12.00 s (process): rank 1 died; the next fault came after 2.00 s, ")


def test_faults_of_several_runs_have_the_name_of_theirs() -> None:
    named = [{**fault, "run": f"replica <{number}>"} for number, fault in enumerate(FAULTS)]
    section = faults_section(named)
    assert "<thead><tr><th>run</th><th>time</th>" in section
    assert "<tr><th>replica &lt;1&gt;</th><td>30.000 s</td>" in section
