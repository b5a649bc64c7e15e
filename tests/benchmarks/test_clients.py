"""The run of clients notices what fails: openai goes through its driver, as each client does."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.clients.__main__ import drive, scripts_of, server_of, table


def test_a_client_that_is_here_goes_through_its_driver(tmp_path: Path) -> None:
    client = {"openai": table()["openai"]}
    assert len(set(scripts_of(table()).values())) == len(scripts_of(table()))
    with server_of(client, tmp_path) as url:
        programs = Path(sys.executable).parents[1]
        for case in ("loop", "stream"):
            assert drive("openai", client["openai"], case, url, programs) == "yes"
        assert drive("openai", client["openai"], "overflow", url, programs) == "says so, ends with 1"
    assert drive("openai", client["openai"], "loop", url, programs).startswith("no (1): ")  # the server is gone
