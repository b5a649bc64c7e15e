"""The run of clients notices what fails: openai goes through its driver, as each client does."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.clients.__main__ import drive, scripts_of, server_of, table


def test_a_client_that_is_here_goes_through_its_driver(tmp_path: Path) -> None:
    clients = table()
    scripts = [text for name, client in clients.items() for text in scripts_of(name, client).values()]
    assert len(set(scripts)) == len(scripts)
    openai, programs = clients["openai"], Path(sys.executable).parents[1]
    with server_of("openai", openai, tmp_path) as url:
        for case in ("loop", "stream"):
            assert drive("openai", openai, case, url, programs) == "yes"
        assert drive("openai", openai, "overflow", url, programs) == "says so, ends with 1"
    assert drive("openai", openai, "loop", url, programs).startswith("no (1): ")  # the server is gone
