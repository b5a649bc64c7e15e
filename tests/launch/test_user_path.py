"""A home that is not known is one line that names the key, whatever the command."""

from __future__ import annotations

import pytest

from gapless.launch.cli import main


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "prompt=x", "model=~nobody-here/m"],
        ["generate", "prompt=x", "model=tiny", "model.tokenizer=~nobody-here/m"],
        ["generate", "model=tiny", "prompts=~nobody-here/p"],
        ["generate", "prompt=x", "model=tiny", "outputs=~nobody-here/o"],
        ["simulate", "scheduler=~nobody-here/policy.py"],
        ["simulate", "workload=trace", "workload.path=~nobody-here/t.csv"],
        ["simulate", "simulation.cost=measured", "simulation.profile=~nobody-here/p"],
        ["report", "~nobody-here/run"],
        ["report", "import=kineto", "~nobody-here/traces"],
        ["diff", "~nobody-here/a", "~nobody-here/b"],
        ["explain", "~nobody-here/a"],
    ],
)
def test_an_unknown_home_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.endswith("cannot expand ~ to a home folder; give the full path\n")
    assert said.count("\n") == 1
