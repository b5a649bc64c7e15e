"""Real servers' cells are read, and picks that were not the best are shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import tp_or_pp


@pytest.mark.slow
@pytest.mark.parametrize("is_best", [True, False])
def test_a_pick_stands_beside_what_was_measured(
    is_best: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow = ("9000", "1000") if is_best else ("1000", "9000")
    rows = [f"qwen3-8b,{tp},{pp},64,{fast if tp == 8 else slow}" for tp, pp in ((8, 1), (1, 8))]
    (tmp_path / "h200_pp.csv").write_text("\n".join(["model,tp,pp,concurrency,output_tok_s", *rows]), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["tp_or_pp.py", "--cells", str(tmp_path)])
    assert tp_or_pp.main() == 0, "one wrong pick is no failure"
    found = capsys.readouterr().out.splitlines()[-1].split()
    expected = "tp8 pp1 100.0% as measured" if is_best else "tp1 pp8 11.11% another"
    assert " ".join(found[2:]) == f"tp8 pp1 {expected}"
