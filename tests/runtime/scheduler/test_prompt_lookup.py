"""The n-gram lookup is that of its definition, token by token."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from gapless.runtime.scheduler.prompt_lookup import LONGEST, SHORTEST, PromptLookup

TOKENS = st.lists(st.sampled_from([0, 1, 2, 256, 65536, 1 << 18]), max_size=60)  # whose bytes overlap one another


def by_definition(tokens: list[int], most: int) -> tuple[int, list[int]]:
    """Return the tokens after the latest earlier occurrence of the longest n-gram that the tokens end with."""
    for n in range(LONGEST, SHORTEST - 1, -1):
        for at in range(len(tokens) - n - 1, -1, -1):
            if tokens[at : at + n] == tokens[-n:]:
                followed = list(tokens)
                for place in range(at + n, at + n + most):
                    followed.append(followed[place])
                return n, followed[len(tokens) :]
    return 0, []


@given(TOKENS, TOKENS, st.integers(1, 20))
@example([1, 0, 0, 256, 1, 0, 0], [], 4)
@example([5, 5, 5], [], 8)
def test_a_guess_is_what_followed_the_latest_longest_match(prompt: list[int], output: list[int], most: int) -> None:
    lookup = PromptLookup()
    lookup.extend(prompt)
    for token in output:
        lookup.extend([token])
    assert len(lookup) == len(prompt + output)
    assert lookup.guess(most) == by_definition(prompt + output, most)


def test_a_loop_is_followed_past_its_end() -> None:
    lookup = PromptLookup()
    lookup.extend([9, 1, 2, 3, 1, 2, 3])
    assert lookup.guess(7) == (3, [1, 2, 3, 1, 2, 3, 1])
    assert PromptLookup().guess(3) == (0, [])
