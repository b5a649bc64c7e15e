"""`gapless diff`: the words, tables and files of two runs changed in one thing, and errors in one line."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gapless.conf.difference import DiffConfig
from gapless.launch.cli import main
from gapless.launch.diff import prepare
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.report.difference.difference_tables import difference_tables
from gapless.runtime.analysis.report.write_comparison import write_comparison
from tests.support.simulated_parts import Device, items, make_replica, run
from tests.support.written_runs import write_data, write_run

REQUESTS = [(8 + 7 * n % 60, 4 + 5 * n % 17, 0.02 * n) for n in range(40)]
CONFIG: dict[str, Any] = {
    "scheduler": {"name": "sarathi"},
    "parallel": {"pp": 2, "layers": None},
    "workload": {"num_prompts": 40},
    "cluster": {"name": "nvlink"},
    "hardware": {"devices": ["fast"]},
}


def write(
    path: Path,
    *,
    policy: str = "sarathi",
    requests: Sequence[Any] = REQUESTS,
    numpy: str = "2.3",
    real: bool = False,
    config: dict[str, Any] | None = None,
    **how: Any,
) -> None:
    """Write the folder of a simulated run that differs from the base in `how`, as `config` and `policy` say."""
    replica = make_replica(policy, host=False, **how)
    assert run(replica, items(*requests)) == len(requests)
    whole = CONFIG | {"scheduler": {"name": policy}} | (config or {})
    whole |= {} if real else {"simulation": {"dispatch_ms": 1e3 * how.get("dispatch_s", 0.0), "replicas": 1}}
    write_data(path, replica.record, whole, versions={"numpy": numpy})


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs of this file."""
    path = tmp_path_factory.mktemp("runs")
    slow = {"devices": ["fast", "slow"]}
    write(path / "base")
    write(path / "orca", policy="orca_best")
    even = [(50, 3 + n % 5) for n in range(40)]
    write(path / "even", requests=even)
    write(path / "worst", requests=even, policy="orca_worst")
    write(path / "slow", devices=[Device(), Device(1.5)], config={"hardware": slow})
    write(path / "late", dispatch_s=0.004)
    write(path / "link", devices=[Device(send_s=0.01), Device()], config={"cluster": {"name": "ethernet"}})
    write(path / "split", layers=(3, 1), config={"parallel": {"pp": 2, "layers": [3, 1]}})
    write(path / "four", layers=(1, 1, 1, 1), config={"parallel": {"pp": 4, "layers": None}})
    write(
        path / "long",
        requests=[*REQUESTS[:20], (90, 30, 0.39), *REQUESTS[20:]],
        config={"workload": {"num_prompts": 41}},
    )
    write(path / "real", real=True, numpy="2.4")
    for n in range(3):
        write(path / f"repeats/{n}", real=True, devices=[Device(1 + 0.02 * n)] * 2)
        write(path / f"others/{n}", real=True, devices=[Device(1.01 + 0.02 * n)] * 2, config={"seed": 1})
        write(path / f"slower/{n}", real=True, devices=[Device(1.5 + 0.02 * n)] * 2, config={"seed": 2})
    write(path / "two/0")
    write(path / "two/1", policy="orca_best")
    fleet = [make_replica(host=False) for _ in range(2)]
    assert run(fleet, items(*REQUESTS)) == len(REQUESTS)
    config = CONFIG | {"simulation": {"dispatch_ms": 0.0, "replicas": 2}}
    write_run(path / "fleet", Fleet([replica.record for replica in fleet]), config)
    return path


@pytest.fixture(autouse=True)
def inside(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    monkeypatch.setenv("COLUMNS", "200")


def diff(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["diff", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("other", "changed", "words"),
    [
        ("orca", "scheduler: sarathi -> orca_best", "No request takes longer or less from arrival to last token."),
        (
            "slow",
            "hardware.devices: [fast] -> [fast,slow]",
            "Stage 1 takes 1.50 times as long for the same micro-batch: ",
        ),
        ("late", "simulation.dispatch_ms: 0 -> 4", "more idle time (control), beginning on stage 0."),
        ("link", "cluster: nvlink -> ethernet", "more idle time (transport), beginning on stage 1."),
        ("split", "parallel.layers: null -> [3,1]", "Stage 0 takes 1.4"),
        ("four", "parallel.pp: 2 -> 4", "Its work is spread over 4 stages instead of 2: "),
        ("long", "workload.num_prompts: 40 -> 41", "requests have the same number and lengths in both, of 40 and 41."),
    ],
)
def test_two_runs_that_differ_in_one_thing(other: str, changed: str, words: str, capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "base", other, f"out=out_{other}")
    assert f"What differs: {changed}" in out
    assert words in out
    found = json.loads(Path(f"out_{other}", "comparison.json").read_text())["difference"]
    makespan = found["makespan"]
    assert found["changed"][0] | {"base": "", "run": ""} == {"name": changed.partition(":")[0], "base": "", "run": ""}
    exact = pytest.approx(makespan["run"] - makespan["base"], abs=1e-9 * (makespan["run"] + makespan["base"]))
    assert sum(makespan["parts"].values()) == exact
    assert all(sum(parts.values()) == exact for parts in makespan["by_stage"])
    page = Path(f"out_{other}", "report.html").read_text()
    assert html.escape(words) in page


def test_a_bubble_that_a_policy_makes(capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "even", "worst", "out=out_worst")
    assert "What differs: scheduler: sarathi -> orca_worst." in out
    assert " more idle time (PB2 prefill / decode), the most on stage 1." in out
    assert "Of 40 requests, 34 take longer from arrival to last token, 6 less." in out


def test_what_does_not_differ(capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "base", "base")
    assert "No setting and no version differs." in out
    assert "The makespan is the same: " in out
    assert "No request takes longer or less from arrival to last token." in out
    assert out.rstrip().endswith("difference/report.html")
    diff(capsys, "base", "base")
    assert Path("difference_2", "comparison.json").is_file()


def test_a_fleet_beside_one_pipeline(capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "base", "fleet", "out=out_fleet")
    assert "What differs: simulation.replicas: 1 -> 2." in out
    found = json.loads(Path("out_fleet/comparison.json").read_text())["difference"]
    assert sum(found["makespan"]["parts"].values()) == pytest.approx(found["makespan"]["change"], abs=1e-9)


def test_repeats_say_what_is_chance(capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "repeats", "others", "out=out_repeats")
    assert out.count("the median of 3 runs") == 2
    assert "Both settings tie: " in out
    assert "BASE is the fastest: " in diff(capsys, "repeats", "slower", "out=out_slower")
    out = diff(capsys, "repeats/0", "slower/0", "out=out_single")
    assert "Each setting ran once, so the noise is not known; repeats=5 shows it." in out
    found = json.loads(Path("out_repeats/comparison.json").read_text())["candidates"]
    durations = {
        f"repeats/{n}": json.loads(Path(f"repeats/{n}/summary.json").read_text())["duration"] for n in range(3)
    }
    assert found[0]["median_run"] == sorted(durations, key=lambda each: durations[each])[1]


def test_a_simulation_beside_a_run(capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "base", "real", "out=out_real")
    assert "BASE is simulated, RUN is not. What differs: numpy: 2.3 -> 2.4." in out


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_terminal(width: int, tmp_path: Path):
    sides = prepare(DiffConfig(runs=("base", "orca")), io.StringIO())  # type: ignore[arg-type]
    _, found = write_comparison(tmp_path, sides, figures=False)
    assert found is not None
    console = Console(width=width, file=io.StringIO())
    for table in difference_tables(found):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "runs: give two run folders, not none, as in gapless diff runs/first runs/second"),
        (["base"], "runs: give two run folders, not 1"),
        (["base", "orca", "slow"], "runs: give two run folders, not 3"),
        (["base", "nowhere"], "nowhere: no such folder"),
        (["base", "two"], "two: holds runs of 2 settings (sarathi, orca_best); give the folder of one of"),
        (["base", "orca", "out=base/summary.json"], "out=base/summary.json: "),
        (["base", "orca", "oot=x"], "oot: unknown key; did you mean 'out'?"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["diff", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gapless: error: ")
    assert message in line
