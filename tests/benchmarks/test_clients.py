"""The run of clients notices what fails: openai goes through its driver, as each client does."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.clients.__main__ import drive, scripts_of, server_of, table
from tests.support.scripted import scripted_model


def test_a_client_that_is_here_goes_through_its_driver(tmp_path: Path) -> None:
    openai, programs = table()["openai"], Path(sys.executable).parents[1]
    with server_of(openai, tmp_path) as url:
        for case in ("loop", "stream", "schema"):
            assert drive(openai, case, url, programs) == "yes"
        assert drive(openai, "overflow", url, programs) == "says so, ends with 1"
    assert drive(openai, "loop", url, programs).startswith("no (1): ")  # the server is gone


def test_the_outputs_for_each_client_make_a_model(tmp_path: Path) -> None:
    """Its scripts share no token, or it is refused."""
    for name, client in table().items():
        scripted_model(tmp_path / name, scripts_of(client), "")
