"""The journal's file: what is read of it, however it was left, and who may have it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.errors import ConfigError
from gapless.runtime.core.messages import TokenLogprobs
from gapless.runtime.serving.journal import Accepted, Journal, Progress, Record, Settled
from gapless.runtime.serving.messages import Tokens, encoder
from tests.support.tiers import examples


def accepted(*numbers: int) -> Accepted:
    return Accepted(f"id-{numbers[0]}", "", "/v1/completions", b"{}", 17, list(numbers))


def tokens(*pairs: tuple[int, int], reasons: dict[int, str] | None = None) -> Tokens:
    numbers, sampled = zip(*pairs, strict=True)
    return Tokens(list(numbers), list(sampled), reasons or {}, {}, {}, {}, 1.0)


@contextmanager
def opened(path: Path, fingerprint: str = "same") -> Iterator[Journal]:
    journal = Journal(path, "tiny", fingerprint)
    try:
        yield journal
    finally:
        journal.close()


def written(path: Path, *records: Record) -> None:
    with opened(path) as journal:
        journal.compact([])
        for record in records:
            journal.write(record)


def test_what_is_unsettled_comes_back_with_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    begun = accepted(3), accepted(4, 5), tokens((3, 7), (5, 8)), accepted(6)
    written(path, *begun, Settled([3]), tokens((5, 9), (6, -1)))
    with opened(path) as journal:
        assert [saved.accepted for saved in journal.saved] == [accepted(4, 5), accepted(6)]
        assert journal.saved[0].outputs.keys() == {5}
        assert journal.saved[0].outputs[5].tokens == [8, 9]
        assert journal.saved[1].outputs[6].tokens == []
        assert (journal.next_number, journal.cut_bytes) == (7, 0)
        journal.compact([])
    with opened(path) as journal:
        assert (journal.saved, journal.next_number) == ([], 7)


def test_a_message_of_the_engine_is_written_as_it_came(tmp_path: Path) -> None:
    path, logprobs = tmp_path / "journal", TokenLogprobs(-0.5, 1, [(7, -0.5)])
    with opened(path) as journal:
        journal.compact([])
        journal.write(accepted(1, 2))
        message = Tokens([1, 2], [7, 8], {1: "length"}, {0: logprobs}, {}, {0: 16}, 1.0, {0: [logprobs]})
        journal.write_encoded(encoder.encode(message))
    with opened(path) as journal:
        first, second = journal.saved[0].outputs[1], journal.saved[0].outputs[2]
    assert (first.tokens, first.logprobs, first.prompt_logprobs, first.cached) == ([7], [logprobs], [logprobs], 16)
    assert (second.tokens, second.reason) == ([8], "length")


def test_progress_is_where_later_tokens_begin(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with opened(path) as journal:
        journal.compact([accepted(1), Progress(1, [5, 6], [], None, 0, None)])
        journal.write(tokens((1, 7), reasons={0: "stop"}))
    with opened(path) as journal:
        (saved,) = journal.saved
    assert (saved.outputs[1].tokens, saved.outputs[1].reason) == ([5, 6, 7], "stop")


@settings(max_examples=examples(60))
@given(cut=st.integers(1, 90), garbage=st.binary(max_size=12))
def test_a_torn_end_is_dropped_and_written_over(tmp_path_factory, cut: int, garbage: bytes) -> None:
    path = tmp_path_factory.mktemp("torn") / "journal"
    written(path, accepted(1), *(tokens((1, token)) for token in range(4)))
    data = path.read_bytes()
    path.write_bytes(data[:-cut] + garbage)
    with opened(path) as journal:
        found = journal.saved[0].outputs[1].tokens if journal.saved and journal.saved[0].outputs else []
        assert found == list(range(len(found)))
        assert journal.cut_bytes + journal.size == len(data) - cut + len(garbage)
        journal.write(accepted(9))
    with opened(path) as journal:
        assert journal.saved[-1].accepted == accepted(9)
        assert journal.cut_bytes == 0


def test_a_damaged_record_ends_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, accepted(1), tokens((1, 5)), tokens((1, 6)))
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with opened(path) as journal:
        assert journal.cut_bytes > 0
        assert [each.tokens for each in journal.saved[0].outputs.values()] in ([], [[5]])


def test_a_file_that_is_no_journal_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "letter"
    path.write_text("Dear reader, this is no journal.\n")
    with pytest.raises(ConfigError, match=r"serve.journal=.*letter: is not a journal"):
        Journal(path, "tiny", "same")
    assert path.read_text() == "Dear reader, this is no journal.\n"


def test_another_models_requests_are_refused_unless_all_are_settled(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, accepted(1))
    with pytest.raises(ConfigError, match="1 unfinished requests of tiny"), opened(path, "another"):
        pass
    with opened(path) as journal:
        journal.write(Settled([1]))
    with opened(path, "another") as journal:
        assert journal.saved == []


def test_one_server_has_it_also_after_it_was_compacted(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with opened(path) as journal:
        for _ in range(2):
            with pytest.raises(ConfigError, match="in use by another server"), opened(path):
                pass
            journal.compact([accepted(1)])
    with opened(path) as journal:
        assert len(journal.saved) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["journal"]
    assert path.stat().st_mode & 0o077 == 0


def test_what_cannot_be_a_journal_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, text in (
        (tmp_path, "is a directory"),
        (tmp_path / "pipe", "must be a regular file"),
        (tmp_path / "no" / "journal", "no such file or directory"),
        (tmp_path / "a\0b", "null"),
    ):
        with pytest.raises(ConfigError, match=text), opened(path):
            pass


def test_a_record_that_the_disk_does_not_take_leaves_no_half(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(path) as journal:
        journal.compact([accepted(1)])
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size + 50, before[1]))
            with pytest.raises(OSError):
                journal.write(Accepted("id", "", "/v1/completions", bytes(1000), 17, [2]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.stat().st_size == journal.size
        journal.write(tokens((1, 5)))
    with opened(path) as journal:
        assert journal.saved[0].outputs[1].tokens == [5]
        assert journal.cut_bytes == 0


def test_it_is_large_after_many_records_and_not_after_it_was_compacted(tmp_path: Path) -> None:
    with opened(tmp_path / "journal") as journal:
        journal.compact([])
        body = bytes(8 << 20)
        for number in range(8):
            assert not journal.is_large
            journal.write(Accepted("id", "", "/v1/completions", body, 17, [number]))
        assert journal.is_large
        journal.compact([])
        assert not journal.is_large
