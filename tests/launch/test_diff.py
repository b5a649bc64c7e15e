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
from gapless.runtime.difference.difference_terminal import makespan_table, request_table, tail_table
from gapless.runtime.difference.run_difference import RunDifference
from gapless.runtime.ledger.fleet import Fleet
from tests.support.simulated_parts import Device, items, make_replica, run
from tests.support.written_runs import write_data, write_run

REQUESTS = [(8 + 7 * n % 60, 4 + 5 * n % 17, 0.02 * n) for n in range(40)]
CONFIG: dict[str, Any] = {"scheduler": {"name": "sarathi"}, "parallel": {"pp": 2}, "workload": {"num_prompts": 40}}


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
    write(path / "four", layers=(1, 1, 1, 1), config={"parallel": {"pp": 4}})
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
        ("orca", "scheduler: sarathi -> orca_best", "P99 TBT is "),
        ("slow", "hardware.devices: - -> [fast,slow]", "Stage 1 takes 1.50 times as long for the same micro-batch: "),
        ("late", "simulation.dispatch_ms: 0 -> 4", "more idle time (control), beginning on stage 0."),
        ("link", "cluster: - -> ethernet", "more idle time (transport), beginning on stage 1."),
        ("split", "parallel.layers: - -> [3,1]", "Stage 0 takes 1.4"),
        ("four", "parallel.pp: 2 -> 4", "Its work is spread over 4 stages instead of 2: "),
        ("long", "workload.num_prompts: 40 -> 41", "Only in RUN: request 20 (90 prompt and 30 output tokens), "),
    ],
)
def test_two_runs_that_differ_in_one_thing(other: str, changed: str, words: str, capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "base", other, f"out=out_{other}")
    assert f"What differs: {changed}" in out
    assert words in out
    found = json.loads(Path(f"out_{other}", "diff.json").read_text())
    makespan = found["makespan"]
    assert found["changed"][0] | {"base": "", "run": ""} == {"name": changed.partition(":")[0], "base": "", "run": ""}
    exact = pytest.approx(makespan["run"] - makespan["base"], abs=1e-9 * (makespan["run"] + makespan["base"]))
    assert sum(makespan["parts"].values()) == exact
    assert all(sum(parts.values()) == exact for parts in makespan["by_stage"])
    assert sum(request["change"] for request in found["requests"]) == exact
    assert makespan["noise"] is None
    for key, summary_key in (("p99_itl", "p99_itl_ms"), ("p99_ttft", "p99_ttft_ms")):
        for side, folder in (("base", "base"), ("run", other)):
            summary = json.loads(Path(folder, "summary.json").read_text())
            assert found[key][side]["seconds"] * 1e3 == pytest.approx(summary[summary_key], rel=1e-6)
        assert sum(found[key]["parts"].values()) == pytest.approx(found[key]["change"], abs=1e-9)
    page = Path(f"out_{other}", "diff.html").read_text()
    assert page.count("<figcaption>stage ") == len(makespan["by_stage"])
    assert html.escape(words) in page


def test_a_bubble_that_a_policy_makes(capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "even", "worst", "out=out_worst")
    assert "What differs: scheduler: sarathi -> orca_worst." in out
    assert " of that is idle time (PB2 prefill / decode), the most on stage 1." in out
    out = diff(capsys, "even", "base", "out=out_even")
    assert "The two served other requests; these are compared by length." in out


def test_what_does_not_differ(capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "base", "base")
    assert "No setting and no version differs." in out
    assert "RUN takes as long as BASE" in out
    assert "P99 TBT is the same" in out
    assert out.rstrip().endswith("difference/diff.html")
    diff(capsys, "base", "base")
    assert Path("difference_2", "diff.json").is_file()


def test_a_fleet_beside_one_pipeline(capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "base", "fleet", "out=out_fleet")
    assert "What differs: simulation.replicas: 1 -> 2." in out
    found = json.loads(Path("out_fleet/diff.json").read_text())
    summary = json.loads(Path("fleet/summary.json").read_text())
    assert found["p99_itl"]["run"]["seconds"] * 1e3 == pytest.approx(summary["p99_itl_ms"], rel=1e-6)
    assert sum(found["makespan"]["parts"].values()) == pytest.approx(found["makespan"]["change"], abs=1e-9)


def test_repeats_say_what_is_chance(capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "repeats", "others", "out=out_repeats")
    assert out.count("the median of 3 runs") == 2
    assert "The difference may be chance: by its repeats, " in out
    assert "The difference is more than chance: " in diff(capsys, "repeats", "slower", "out=out_slower")
    assert "The difference is more than chance: " in diff(capsys, "repeats/0", "slower", "out=out_one")
    out = diff(capsys, "repeats/0", "slower/0", "out=out_single")
    assert "One run of each does not show what varies from run to run: repeats=5 does." in out
    found = json.loads(Path("out_repeats/diff.json").read_text())
    assert found["repeats"] == [3, 3]
    durations = {
        f"repeats/{n}": json.loads(Path(f"repeats/{n}/summary.json").read_text())["duration"] for n in range(3)
    }
    assert found["base"] == sorted(durations, key=lambda each: durations[each])[1]
    low, high = found["makespan"]["noise"]["base"]
    assert low < found["makespan"]["base"] < high


def test_a_simulation_beside_a_run(capsys: pytest.CaptureFixture[str]):
    out = diff(capsys, "base", "real", "out=out_real")
    assert "BASE is simulated, RUN is not. What differs: numpy: 2.3 -> 2.4." in out


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_terminal(width: int, here: Path):
    found = RunDifference(*prepare(DiffConfig(runs=("base", "orca")), io.StringIO()))  # type: ignore[arg-type]
    console = Console(width=width, file=io.StringIO())
    for table in (makespan_table(found.makespan), tail_table(found.tails), request_table(found.requests)):
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
