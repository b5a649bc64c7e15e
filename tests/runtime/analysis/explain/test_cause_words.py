"""A run in words: cause, size and change first, then how sure that is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from gapless.runtime.analysis.drawing.page_parts import words_section
from gapless.runtime.analysis.explain.cause_words import cause_name, sentences
from gapless.runtime.analysis.explain.roots import Root
from gapless.runtime.analysis.explain.run_words import RunWords
from gapless.runtime.analysis.explain.sized_cause import SizedCause
from gapless.runtime.analysis.ledger.causes import Cause

CAUSE = SizedCause(Root.SLOW_STAGE, 4.0, 3.5, 4.5, 0.4, stage=2, evidence={"ratio": 2.4})


def test_a_change_is_named_with_what_it_saves() -> None:
    changed = replace(CAUSE, change="layers=[17,9]", saves_seconds=3.0, note="p99 TBT is 2x as long")
    words = sentences([changed], {}, metric="duration", value=10.0, error=0.02)
    assert words == [
        "A slow stage 2 (2.4x the other stages' time) costs 4.00 s of 10.00 s (40.0%); layers=[17,9] saves 3.00 s, but "
        "p99 TBT is 2x as long.",
        "The cost is the run minus a replay without the cause. Its 90% interval is 3.50 s to 4.50 s. The replay of the "
        "unchanged run is off by 2.0%.",
    ]


def test_the_next_cause_is_named_too_and_a_tail_as_one() -> None:
    other = replace(CAUSE, cause=Root.TRANSPORT, stage=0, evidence={}, seconds=1.0, low=1.0, high=1.0, share=0.1)
    words = sentences([CAUSE, other], {}, metric="p99_ttft_ms", value=10.0)
    assert " of 10.00 s of p99 TTFT (40.0%)" in words[0]
    assert words[2].startswith(
        "Next: slow links, mostly after stage 0 cost 1.00 s of 10.00 s of p99 TTFT (10.0%); a faster link"
    )


def test_what_others_ran_gets_no_keys_of_ours() -> None:
    words = sentences([CAUSE], {}, metric="duration", value=10.0, is_ours=False)
    assert "parallel.layers" not in words[0]
    assert words[0].endswith("; fewer layers on it or a device like the other stages' would help.")


def test_health_is_told_from_a_lack_of_time() -> None:
    idle = {Cause.FILL_DRAIN: 0.03, Cause.PB3_DECODE_CONTEXT: 0.01}
    (healthy,) = sentences([], idle, metric="duration", value=10.0, running=20.0)
    none = "No cause worth fixing: stages were"
    assert healthy == f"{none} 96.0% busy; the rest is mostly the run's start and end (3.0%)."
    (unsure,) = sentences([], idle, metric="duration", value=10.0, left=["policy", "transport"])
    assert unsure.startswith("Stages were 96.0% busy. Not checked for lack of time: policy and transport; ")
    (far_off,) = sentences([], idle, metric="p99_ttft_ms", value=0.02, error=-0.4)
    off = "the replay of the unchanged run is off by 40.0% in p99 TTFT"
    assert far_off.startswith(f"No cause is certain, since {off}: stages were 96.0% busy; ")
    (single,) = sentences([], {Cause.STARVED_IN_FLIGHT: 0.7}, metric="duration", value=10.0, running=1.0)
    assert single == f"{none} 30.0% busy. A single request at a time cannot fill the pipeline."


@pytest.mark.parametrize("root", Root)
def test_each_root_has_its_words(root: Root) -> None:
    for evidence in ({}, defaultdict(lambda: 1.0, {"layers": 8.0, "of_layers": 12.0})):
        cause = replace(CAUSE, cause=root, evidence=evidence)
        first, *_ = sentences([cause], {}, metric="duration", value=10.0, about=RunWords({}))
        assert first.endswith(".")
        assert "4.00 s of 10.00 s (40.0%)" in first
        assert cause_name(cause)


def test_the_first_sentence_of_a_page_stands_out() -> None:
    assert words_section(["a < b.", "c.", "d."]) == (
        '<section class="verdict"><p><b>a &lt; b.</b></p><p>c. d.</p></section>\n'
    )
    assert words_section([]) == ""
