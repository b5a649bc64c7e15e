"""The command line through real processes and in this one: help, errors, hydra's folders, what a prompt survives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.conf.build import compose_engine, dotted_keys, to_mapping
from gapless.conf.policies import POLICY_CONFIGS
from gapless.conf.schema import GenerateConfig
from gapless.launch import compose
from gapless.launch.cli import main
from gapless.launch.commands import COMMANDS
from tests.support.forked import gapless
from tests.support.tiers import HANGS_S, examples

HEAVY = ("torch", "ray", "transformers", "megatron", "hydra", "numpy")


def configs(*overrides: str, multirun: bool = False) -> list[GenerateConfig]:
    return [point.config for point in compose.compose_all(overrides, GenerateConfig, "generate", multirun=multirun)]


def one(*overrides: str) -> GenerateConfig:
    (config,) = configs(*overrides)
    return config


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["generate", "--help"],
        ["bench", "--help"],
        ["generate", "--help", "all"],
        ["serve", "--help"],
        ["report", "--help"],
        ["--version"],
        ["serv"],
    ],
)
def test_help_and_errors_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom gapless.launch.cli import main\n"
        f"main({arguments!r})\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_config_errors_import_no_torch() -> None:
    code = (
        "import sys\nfrom gapless.launch.cli import main\nmain(['generate', 'prompt=x', 'scheduler.chunk=x'])\n"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, check=True)
    assert done.stderr == "gapless: error: scheduler.chunk='x': must be an integer or auto\n"
    assert done.stdout == "[]\n"


def test_help_lists_every_command_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for command in COMMANDS.values():
        assert f"\n  {command.name} " in overview
        assert main([command.name, "--help", "all"]) == 0
        detail = capsys.readouterr().out
        set_by_itself = getattr(command.config, "INSTEAD", {})
        for key, _ in dotted_keys(command.config):
            is_told = re.search(rf"^  {re.escape(key)}[=\s]", detail, re.MULTILINE) is not None
            assert is_told == (key not in set_by_itself), key
        assert max(map(len, detail.splitlines())) <= 120
    for example in (example for command in COMMANDS.values() for example in command.examples):
        assert example in re.sub(r" \\\n +", " ", overview)


NO_SWEEPER = "hydra sweepers are not supported; use commas, as in -m scheduler.chunk=128,256"
UNREADABLE = (
    "hydra cannot parse this value (no viable alternative at input '[1'); "
    "quote it as KEY='...' inside the shell's quotes"
)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["generat"], "generat: unknown command; did you mean 'generate'?"),
        (["--hlp"], "--hlp: unknown option; did you mean '--help'?"),
        (["generate", "--multrun"], "--multrun: unknown option; did you mean '--multirun'?"),
        (["generate", "scheduler.chnk=3"], "scheduler.chnk: unknown key; did you mean 'scheduler.chunk'?"),
        (["generate", "+scheduler.chnk=3"], "scheduler.chnk: unknown key; did you mean 'scheduler.chunk'?"),
        (["generate", "chunk=3"], "chunk: unknown key; did you mean 'scheduler.chunk'?"),
        (["generate", "pp=2"], "pp: unknown key; did you mean 'parallel.pp'?"),
        (
            ["generate", "model.architecture.num_layrs=3"],
            "model.architecture.num_layrs: unknown key; did you mean 'model.architecture.num_layers'?",
        ),
        (["generate", "scheduler=sarati"], "scheduler=sarati: unknown; did you mean 'sarathi'?"),
        (["generate", "parallel=pp0"], "parallel=pp0: unknown; did you mean 'pp2'? (tpN, ppM or tpN_ppM)"),
        (["generate", "parallel=pp2tp2"], "parallel=pp2tp2: unknown; did you mean 'tp2'? (tpN, ppM or tpN_ppM)"),
        (["generate", "-m", "scheduler=sarathi,orca_bst"], "scheduler=orca_bst: unknown; did you mean 'orca_best'?"),
        (["generate", "-m", "prompt=x", "scheduler.chunk=8,x"], "scheduler.chunk='x': must be an integer or auto"),
        (["generate", "scheduler.chunk=abc"], "scheduler.chunk='abc': must be an integer or auto"),
        (["generate", "scheduler.chunk="], "scheduler.chunk='': must be an integer or auto"),
        (["generate", "++scheduler.chunk=0"], "scheduler.chunk=0: must be auto or 1 or more"),
        (
            ["generate", "scheduler=orca_best", "scheduler.chunk=8"],
            "scheduler.chunk: unknown key of policy orca_best; sarathi, equal_time have it",
        ),
        (
            ["generate", "-m", "prompt=x", "scheduler=orca_best,request_level", "scheduler.chunk=8"],
            "scheduler.chunk: unknown key of orca_best, request_level; sarathi, equal_time have it",
        ),
        (
            ["generate", "scheduler=sarathi,orca_best"],
            "scheduler=sarathi,orca_best: comma-separated values are a sweep; add -m to run each",
        ),
        (
            ["generate", "workload=zipf"],
            "workload: unknown key; valid: cache, chat, cluster, hardware, model, "
            "outputs, parallel, print_texts, prompt, prompts, sampling, scheduler, seed",
        ),
        (
            ["generate", "scheduler.chunk=1,2"],
            "scheduler.chunk=1,2: comma-separated values are a sweep; add -m to run each",
        ),
        (
            ["serve", "serve.api_keys=a,b"],
            "serve.api_keys=a,b: comma-separated values are a sweep; for a list write serve.api_keys=[a,b]",
        ),
        (["generate", "scheduler.chunk"], "'scheduler.chunk': expected KEY=VALUE"),
        (["generate", "=3"], "'=3': expected KEY=VALUE"),
        (["generate", "~scheduler"], "~scheduler: keys cannot be removed; use KEY=VALUE"),
        (["generate", "parallel.layers=[1"], f"parallel.layers=[1: {UNREADABLE}"),
        (["generate", "scheduler.chunk=${nope}"], "scheduler.chunk: Interpolation key 'nope' not found"),
        (
            ["generate", "parallel.pp=2", "parallel.launcher=local"],
            "parallel.launcher='local': must be process, ray or torchrun for 2 ranks (pp=2 x tp=1); "
            "local runs one rank",
        ),
        (["generate", "sampling.top_p=2"], "sampling.top_p=2.0: must be above 0, at most 1"),
        (["generate", "model.weights=no such"], "model.weights=no such: no such folder"),
        (["generate", "prompt="], "prompt='': must not be empty"),
        (["generate", "prompt=a", "prompts=b"], "prompt and prompts are both given; give one of them"),
        (["generate", "prompts=none.txt"], "prompts=none.txt: no such file"),
        (["generate", "prompts=."], "prompts=.: is a directory"),
        (["generate", "prompt=x", "outputs=no/such.jsonl"], "outputs=no/such.jsonl: no such folder: no"),
        (["generate", "prompt=x", "hydra/launcher=nope"], "hydra/launcher=nope: unknown; valid: basic, joblib"),
        (["generate", "prompt=x", "-m", "hydra/sweeper=optuna"], f"hydra/sweeper: {NO_SWEEPER}"),
        (
            ["generate", "prompt=x", "-m", "hydra.sweeper.max_batch_size=2"],
            f"hydra.sweeper.max_batch_size: {NO_SWEEPER}",
        ),
    ],
)
def test_each_error_is_one_line_and_starts_nothing(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capfd.readouterr() == ("", f"gapless: error: {line}\n")
    assert list(tmp_path.iterdir()) == []


def test_exit_code_of_the_process(tmp_path: Path) -> None:
    done = gapless("generate", "scheduler=sarati", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gapless: error: scheduler=sarati: unknown; did you mean 'sarathi'?\n"


def test_a_closed_standard_output_is_no_error() -> None:
    command = [sys.executable, "-m", "gapless.launch.cli", "--version"]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_empty_standard_input_is_one_line(tmp_path: Path) -> None:
    done = gapless("generate", cwd=tmp_path, stdin="\n \n")
    assert (done.returncode, done.stderr) == (2, "gapless: error: standard input: has no prompts\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world (=x)",
        "a,b",
        "",
        "'",
        '"',
        "it's",
        "\\",
        "end\\",
        "\\'",
        "${x}",
        "\\${x}",
        "${oc.env:HOME}",
        "???",
        "null",
        "5",
        "true",
        "[1,2]",
        "{a: b}",
        "line\nbreak",
        " tabs\t",
        "é漢🎈",
        "k=v=w",
        "choice(a,b)",
        "range(1,9)",
    ],
)
def test_a_prompt_survives_hydra(text: str) -> None:
    assert one(f"prompt={text}").prompt == text


@given(st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from("\\'\"${}[]()=, \n")))
@settings(max_examples=examples(25))
def test_any_text_survives_hydra(text: str) -> None:
    assert [config.prompt for config in configs(f"prompt={text}", multirun=True)] == [text]


@pytest.mark.parametrize("name", ["shipped", "a,b.txt", "it's (1).jsonl", "[x]", "{file: y}"])
def test_a_file_s_name_survives_hydra(name: str) -> None:
    config = one(f"prompts={name}", f"outputs={name}")
    assert (config.prompts, config.outputs) == (name, name)


def test_null_is_no_file() -> None:
    config = one("prompts=null", "outputs=null", "model.tokenizer=null")
    assert (config.prompts, config.outputs, config.model.tokenizer) == (None, None, None)


def test_plus_forms_and_the_later_of_two_hold() -> None:
    assert one("+scheduler.chunk=8").scheduler == one("++scheduler.chunk=8").scheduler
    assert one("seed=1", "seed=2").seed == 2
    assert one("scheduler=orca_best", "scheduler=request_level").scheduler.name == "request_level"


def test_a_rank_grid_is_what_its_name_says(capsys: pytest.CaptureFixture[str]) -> None:
    grids = configs("parallel=local,pp3,tp3,tp5_pp7", multirun=True)
    assert [(grid.parallel.tp, grid.parallel.pp) for grid in grids] == [(1, 1), (1, 3), (3, 1), (5, 7)]
    assert one("parallel=tp2_pp2", "parallel.pp=3").parallel.pp == 3
    assert [one(f"parallel.pp={pp}").parallel.started_by for pp in (1, 3)] == ["local", "ray"]
    assert one("parallel=pp3", "parallel.launcher=torchrun").parallel.started_by == "torchrun"


@pytest.mark.parametrize("name", [name for name in COMMANDS if not COMMANDS[name].positional])
def test_help_is_short_and_all_of_it_is_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    keys = [line for line in lines if re.match(r"  [a-z_.]+(=| )", line)]
    assert len(lines) <= 80
    assert max(map(len, lines)) < 80
    assert 25 <= len(keys) <= 52
    assert main([name, "--help", "cache"]) == 0
    found = capsys.readouterr().out
    assert "cache.num_blocks" in found
    assert "hardware.tile" not in found
    main([name, "--help=anks"])
    assert "parallel.tp=" not in capsys.readouterr().out, "tensor-parallel ranks: only the end of the word"
    assert main([name, "--help=qwxk"]) == 2
    assert "--help qwxk: no match" in capsys.readouterr().err


def test_keys_that_the_yaml_lacks_can_be_set(tmp_path: Path) -> None:
    scaling = "model.architecture.rope_scaling"
    config = one("model=tiny", f"{scaling}.type=linear", f"{scaling}.factor=2")
    assert config.model.architecture is not None
    assert config.model.architecture.rope_scaling is not None
    assert config.model.architecture.rope_scaling.factor == 2.0


def test_sweep_is_the_product_of_its_values() -> None:
    swept = configs("scheduler=sarathi,orca_best", "seed=range(0,3)", "sampling.top_k=1,2", multirun=True)
    points = {(config.scheduler.name, config.seed, config.sampling.top_k) for config in swept}
    assert len(swept) == 12
    assert points == {(s, i, k) for s in ("sarathi", "orca_best") for i in range(3) for k in (1, 2)}


@pytest.mark.parametrize(
    ("overrides", "choices"),
    [
        ([], {"model": "shipped"}),
        (["parallel=pp2"], {"model": "shipped", "pp": 2}),
        (
            ["model=tiny", "parallel=tp2_pp2", "scheduler=orca_best", "hardware=a100-80g"],
            {"model": "tiny", "pp": 2, "tp": 2, "scheduler": "orca_best", "hardware": "a100-80g"},
        ),
        (
            [
                "parallel=tp2",
                "parallel.launcher=torchrun",
                "scheduler.chunk=48",
                "cache.num_blocks=64",
                "hardware.memory_gib=2",
            ],
            {
                "model": "shipped",
                "tp": 2,
                "launcher": "torchrun",
                "overrides": {"scheduler.chunk": 48, "cache.num_blocks": 64, "hardware.memory_gib": 2},
            },
        ),
        (
            ["model=my, [model]", "parallel.pp=3", "parallel.layers=[1,2,1]"],
            {"model": "my, [model]", "pp": 3, "overrides": {"parallel.layers": (1, 2, 1)}},
        ),
    ],
)
def test_command_line_and_python_api_agree(
    overrides: list[str], choices: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my, [model]").mkdir()
    mapping = to_mapping(one(*overrides))
    engine = to_mapping(compose_engine(**choices))  # type: ignore[arg-type]
    assert {key: mapping[key] for key in engine} == engine
    assert set(engine) == set(to_mapping(compose_engine(model="shipped")))
    assert POLICY_CONFIGS.keys() >= {engine["scheduler"]["name"]}
