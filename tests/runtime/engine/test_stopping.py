"""Stop strings: found as early as can be, however the text is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.runtime.engine.stopping import StopChecker
from tests.support.tiers import examples


def reference(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        for s in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(s):
                return text[: end if include else end - len(s)], s
    return text, None


@settings(max_examples=examples(400))
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.booleans(),
)
def test_the_text_is_cut_at_the_first_stop_string(pieces, stop, include):
    checker, out, ended = StopChecker(stop, include), "", False
    seen = ""
    for piece in pieces:
        emit, stopped = checker.push(piece)
        out, ended = out + emit, ended or stopped
        seen += piece
        if not ended:  # all but the beginning of a stop string is out
            held = seen[len(out) :]
            assert seen.startswith(out)
            assert not held or any(s.startswith(held) and s != held for s in stop)
    assert checker.flush() == ("" if ended else "".join(pieces)[len(out) :])
    text, found = reference("".join(pieces), stop, include)
    assert checker.stop_string == found
    if found is not None:
        assert out == text


def test_nothing_follows_a_stop_string():
    checker = StopChecker(["END"])
    assert checker.push("text E") == ("text ", False)
    assert checker.push("ND tail") == ("", True)
    assert checker.push("more") == ("", True)
    assert checker.flush() == ""


def test_a_beginning_that_comes_to_nothing_is_given_out():
    checker = StopChecker(["aab"])
    assert checker.push("aa") == ("", False)
    assert checker.push("a") == ("a", False)
    assert checker.push("c") == ("aac", False)


def test_before_min_tokens_text_passes_through():
    checker = StopChecker(["x"], include_stop=True)
    assert checker.push("axb", active=False) == ("axb", False)
    assert checker.push("cxd") == ("cx", True)
