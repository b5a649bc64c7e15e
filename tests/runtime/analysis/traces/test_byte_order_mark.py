"""A trace with a byte order mark is read as one without it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gapless.runtime.analysis.traces.chrome_trace import ChromeTrace

MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("trace", [{"traceEvents": [{"name": "a"}]}, [{"name": "a"}]])
def test_a_chrome_trace(pack: Callable[[bytes], bytes], trace: object, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(pack(MARK + json.dumps(trace).encode()))
    assert list(ChromeTrace(file).events()) == [{"name": "a"}]
