"""What commands print on terminals of several widths: lines that fit, with numbers and names in one piece."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest

from gapless.launch.cli import main
from tests.support import forked
from tests.support.tiers import HANGS_S, first_quick

WIDTHS = (60, 80, 120)
STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FRAME = re.compile(r"[│┃┏┓┗┛┡┩└┘├┤┳┻┼╇━─┬┴]")


def on_terminal(width: int, *arguments: str) -> list[str]:
    """Return the lines that a command prints on a terminal of this width, without styles."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = forked.Process(forked.main, arguments, **streams, env=environment | {"TERM": "xterm"})
    os.close(terminal)
    printed = b""
    while True:
        try:
            data = os.read(screen, 1 << 16)
        except OSError:  # the last writer is gone
            break
        if not data:
            break
        printed += data
    os.close(screen)
    text = printed.decode()
    assert process.wait(HANGS_S) == 0, text
    return STYLES.sub("", text).replace("\r\n", "\n").splitlines()


def piped(*arguments: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    done = forked.gapless(*arguments, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_pipe_that_wants_colours_gets_no_bar_that_moves(tmp_path: Path) -> None:
    """A notebook sets FORCE_COLOR, and shows what moves a cursor as garbage."""
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm"}
    done = forked.gapless("simulate", "workload.num_prompts=2", cwd=tmp_path, env=environment)
    assert "\x1b[1m" in done.stdout
    assert "\x1b[?" not in done.stderr
    assert "2/2 requests" in done.stderr


def without_paths(lines: list[str]) -> list[str]:
    """Without the lines that name files: a path stays in one piece, so that it can be copied."""
    return [line for line in lines if not re.match(r"(numbers|figures|report|outputs) +/", line)]


def words(lines: list[str]) -> set[str]:
    return set(FRAME.sub(" ", "\n".join(lines)).split())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Simulate a comparison of policies with long names."""
    folder = tmp_path_factory.mktemp("terminal") / "runs"
    piped(
        "simulate",
        "model=llama2-70b",
        "parallel=tp4_pp2",
        "workload.num_prompts=20",
        f"hydra.run.dir={folder}",
        "scheduler=sarathi,equal_time,prefill_first,token_throttle,request_level",
    )
    return folder


@pytest.mark.parametrize("width", first_quick(WIDTHS))
def test_tables_have_their_numbers_and_names_in_one_piece(runs: Path, tmp_path: Path, width: int):
    for folders in ([str(runs / "02_equal_time")], sorted(map(str, runs.glob("0*")))):
        arguments = ["report", *folders, f"out={tmp_path}", "figures=false"]
        shown = without_paths(on_terminal(width, *arguments))
        assert max(map(len, shown)) <= width
        pieces = words(shown) - words(on_terminal(200, *arguments))
        assert pieces <= {"idlest", "busiest"}  # remarks on stages, where not all of them have room
    assert words(shown) >= {"equal_time", "prefill_first", "token_throttle", "request_level"}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", ["generate", "generate all", "simulate all", "tune all", "report", ""])
def test_help_fits_the_terminal(command: str, width: int):
    name, _, asked = command.partition(" ")
    arguments = [word for word in (name, "--help", asked) if word]
    lines, wide = on_terminal(width, *arguments), piped(*arguments)
    assert all(len(line) <= width or re.fullmatch(r"  hardware\.costs\.[\w.]+", line) for line in lines)
    assert max(map(len, wide)) > 80  # a pipe has no width: it gets the widest
    keys = re.compile(r"^  ([a-z_]+\.[a-z_.]+)(?:[= ]|$)", re.MULTILINE)
    assert keys.findall("\n".join(lines)) == keys.findall("\n".join(wide))


def test_help_has_the_keys_used_most_first_and_the_costs_last():
    lines = piped("simulate", "--help", "all")
    headings = [line for line in lines if re.fullmatch(r"\S.*:", line)]
    assert headings[1] == "keys (KEY=VALUE), with the defaults of these groups:"
    assert headings[2] == "most used:"
    assert headings[-2].startswith("hardware.costs")
    assert headings[-1] == "examples:"
    first = lines[lines.index("most used:") + 1 :]
    assert first[0].startswith("  workload.num_prompts=") or first[0].startswith("  slo.")
    costs = [number for number, line in enumerate(lines) if line.startswith("  hardware.costs.")]
    others = [number for number, line in enumerate(lines) if re.match(r"  (?!hardware\.costs)[a-z_]+\.[a-z_]+=", line)]
    assert min(costs) > max(others)


def test_generate_prints_a_few_texts_and_where_the_rest_is(tmp_path: Path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt number {number}\n" for number in range(6)))
    arguments = (
        "generate",
        "model=tiny",
        f"prompts={prompts}",
        "sampling.max_tokens=2",
        "parallel.threads=1",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    lines = on_terminal(80, *arguments)
    text = "\n".join(lines)
    assert re.findall(r"^(\d) · \d+ prompt tokens", text, re.MULTILINE) == ["0", "1", "2"]
    assert f"3 more prompts in {tmp_path / 'run' / 'outputs.jsonl'}" in text.replace("\n", "")
    assert len((tmp_path / "run" / "outputs.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_is_not_in_utf_8_gets_the_report(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    arguments = ["model=tiny", "parallel=local", "workload.num_prompts=4", "workload.max_len=64", "workload.min_len=8"]
    assert main(["simulate", *arguments]) == 0
    said = written.getvalue().decode(encoding)
    assert "Idle time" in said
    assert "report" in said
