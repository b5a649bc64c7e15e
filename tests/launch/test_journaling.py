"""Whose requests a journal holds: ids are of a path and of a key, and nobody finds those of another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from gapless.launch.server.engine_client import Call
from gapless.launch.server.errors import ApiError
from gapless.launch.server.journaling import Journaling
from gapless.runtime.serving.journal import Accepted, Journal

UNUSED = cast(Any, None)  # what was asked is read only when the file is written anew
PATH = "/v1/completions"


@pytest.fixture
def journaling(tmp_path: Path) -> Iterator[Journaling]:
    journal = Journal(tmp_path / "journal", "tiny", "same")
    journal.compact([])
    yield Journaling(journal)
    with suppress(OSError):  # a test has closed it
        journal.close()


def accepted(id: str, number: int, owner: str = "alice", path: str = PATH) -> Accepted:
    return Accepted(id, owner, path, b"{}", 17, [number])


def read(tmp_path: Path) -> list[str]:
    journal = Journal(tmp_path / "journal", "tiny", "same")
    try:
        return [each.accepted.id for each in journal.saved]
    finally:
        journal.close()


def test_an_id_is_taken_until_its_request_is_settled_and_for_its_key_and_path_alone(journaling: Journaling) -> None:
    call = Call()
    journaling.accept(accepted("mine", 0), UNUSED, call)
    for path, owner, id in ((PATH, "bob", "mine"), ("/v1/responses", "alice", "mine"), (PATH, "alice", "yours")):
        journaling.check_new(path, owner, id)
    with pytest.raises(ApiError) as taken:
        journaling.check_new(PATH, "alice", "mine")
    assert taken.value.status == 409
    call.on_settled()
    journaling.check_new(PATH, "alice", "mine")


def test_what_was_taken_up_is_found_by_its_key_and_path_with_or_without_its_prefix(journaling: Journaling) -> None:
    resumed = journaling.resume(accepted("cmpl-7", 0), Call(), lambda: [])
    for id in ("7", "cmpl-7"):
        found = journaling.find(PATH, "alice", id)
        assert found is not None
        assert found == ((PATH, "alice", "cmpl-7"), resumed)
    for path, owner, id in ((PATH, "bob", "7"), (PATH, "", "7"), ("/v1/responses", "alice", "7"), (PATH, "alice", "8")):
        assert journaling.find(path, owner, id) is None
    with pytest.raises(ApiError, match="was resumed from the journal"):
        journaling.check_new(PATH, "alice", "cmpl-7")


def test_the_file_keeps_what_is_unsettled(journaling: Journaling, tmp_path: Path) -> None:
    calls = [Call(), Call(), Call()]
    for number, call in enumerate(calls):
        journaling.accept(accepted(f"id-{number}", number), UNUSED, call)
    calls[1].on_settled()
    calls[1].on_settled()  # the client's end may be told twice
    journaling.close()
    calls[0].on_settled()  # after the end of the server nothing is written
    assert read(tmp_path) == ["id-0", "id-2"]
