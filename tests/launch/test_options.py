"""Options of the command line: those that print instead of running, those of hydra that cannot serve, near misses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from hydra._internal.utils import get_args_parser

from gapless.launch.cli import main
from gapless.launch.commands import COMMANDS
from gapless.launch.options import INSTEAD, OPTIONS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    before = list(sys.argv)
    assert main(arguments) == 0
    assert sys.argv == before
    out, err = capfd.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("command", [name for name in COMMANDS if not COMMANDS[name].positional])
def test_cfg_prints_the_config_of_each_command_and_runs_nothing(
    command: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(printed(capfd, command, "--cfg", "job", "model=tiny"))
    assert config["model"]["name"] == "tiny"
    assert "hydra" not in config
    assert not list(here.iterdir())


def test_cfg_prints_what_the_overrides_make_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert yaml.safe_load(printed(capfd, "generate", "prompt=a, b (c)", "-c", "job"))["prompt"] == "a, b (c)"
    config = yaml.safe_load(printed(capfd, "bench", "--cfg=job", "scheduler=sarathi,orca_best"))
    assert [policy["name"] for policy in config["policies"]] == ["sarathi", "orca_best"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--version"], "gapless "),
    ],
)
def test_what_is_printed_instead_of_a_run(
    options: list[str], line: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert line in printed(capfd, "generate", *options)
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["generate", "--cfg"], "--cfg: missing value: job"),
        (["generate", "--cfg", "jb"], "--cfg jb: unknown; did you mean 'job'?"),
        (
            ["generate", "--cfg", "job", "scheduler.chnk=3"],
            "scheduler.chnk: unknown key; did you mean 'scheduler.chunk'?",
        ),
        (["generate", "--cfg", "hydra"], "--cfg hydra: unknown; valid: job"),
        (["generate", "--cfg", "job", "-p", "model"], "-p: not supported; --cfg job prints the whole config"),
        (["generate", "--info", "config"], "--info: not supported; use --cfg job"),
        (["generate", "-m", "--cfg", "job"], "--multirun and --cfg are exclusive; give one of them"),
        (["generate", "-m=yes"], "-m=yes: -m takes no value"),
        (["report", "--cfg", "job"], "--cfg: not an option of report; valid: --help, --version"),
        (["--cfg", "job"], "--cfg: goes after a command, as in gapless generate --cfg"),
        (["--versoin"], "--versoin: unknown option; did you mean '--version'?"),
        (["generate", "--mutlirun"], "--mutlirun: unknown option; did you mean '--multirun'?"),
        (["generate", "--out", "x"], "--out: unknown option; did you mean 'outputs=x'?"),
        (["generate", "--out=x"], "--out: unknown option; did you mean 'outputs=x'?"),
        (["generate", "--model", "tiny"], "--model: unknown option; did you mean 'model=tiny'?"),
        (["generate", "--tp", "2"], "--tp: unknown option; did you mean 'parallel.tp=2'?"),
        (["generate", "--max-tokens", "8"], "--max-tokens: unknown option; did you mean 'sampling.max_tokens=8'?"),
        (
            ["generate", "--sampling.max-tokens", "8"],
            "--sampling.max-tokens: unknown option; did you mean 'sampling.max_tokens=8'?",
        ),
        (["generate", "--seed"], "--seed: unknown option; did you mean 'seed=VALUE'?"),
        (
            ["report", "runs/first", "--sort", "mean_tpot_ms"],
            "--sort: unknown option; did you mean 'sort=mean_tpot_ms'?",
        ),
        (["generate", "hydra/launcher=nope"], "hydra/launcher=nope: unknown; valid: basic"),
        (["generate", "hydra/nope=basic"], "hydra/nope: unknown hydra group"),
    ],
)
def test_each_wrong_option_is_one_line(
    arguments: list[str], line: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"gapless: error: {line}")
    assert len(err.splitlines()) == 1
    assert not list(here.iterdir())


def test_a_plug_in_of_hydra_s_that_is_not_installed_names_its_extra(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydra.core.config_store import ConfigStore

    known = dict(ConfigStore.instance().repo["hydra"]["launcher"])
    known.pop("joblib.yaml", None)
    monkeypatch.setitem(ConfigStore.instance().repo["hydra"], "launcher", known)
    assert main(["generate", "prompt=x", "-m", "hydra/launcher=joblib"]) == 2
    line = "hydra/launcher=joblib: not installed; run pip install '.[sweep]' in a checkout"
    assert capfd.readouterr().err == f"gapless: error: {line}\n"


def test_every_option_of_hydra_s_is_taken_or_has_its_reason() -> None:
    ours = {name for option in OPTIONS for name in option.names}
    refused = {name for names in INSTEAD for name in names}
    of_hydra = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert {"--multirun", "-m", "--config-dir"} <= of_hydra
    assert of_hydra <= ours | refused
    assert not ours & refused
