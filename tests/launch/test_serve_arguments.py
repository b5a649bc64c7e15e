"""What users of vLLM write behind `gapless serve`: each option becomes the key that it is here, and a line says so."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from gapless.conf.build import dotted_keys, group_names
from gapless.conf.errors import ConfigError
from gapless.conf.schema import ServeConfig
from gapless.launch.cli import main
from gapless.launch.commands import COMMANDS
from gapless.launch.compose import compose_one
from gapless.launch.help import command as help_text
from gapless.launch.serve_arguments import (
    _ALONE,
    _KEYS,
    _REFUSED,
    _SHORT,
    _WITH_VALUE,
    _WRITERS,
    as_overrides,
    with_default_model,
)
from gapless.models.gguf.smollm2 import is_installed
from tests.support.forked import gapless


def overrides(*words: str) -> list[str]:
    return as_overrides(words, COMMANDS["serve"])


def config(*words: str) -> ServeConfig:
    return compose_one(overrides(*words), ServeConfig, "serve")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("tiny --port 9000", ["model=tiny", "serve.port=9000"]),
        ("--port=9000 tiny", ["serve.port=9000", "model=tiny"]),
        ("--model tiny -tp 2 -pp=3", ["model=tiny", "parallel.tp=2", "parallel.pp=3"]),
        ("--tensor_parallel_size 2", ["parallel.tp=2"]),
        ("--max-model-len 8k --max-num-seqs 4", ["model.max_model_len=8000", "scheduler.batch=4"]),
        ("--max-model-len 1.5K", ["model.max_model_len=1536"]),
        ("--max-model-len -1", ["model.max_model_len=null"]),
        ("--max-num-batched-tokens 512", ["scheduler.chunk=512"]),
        (
            "--max-num-batched-tokens 512 scheduler=token_budget",
            ["scheduler.max_batched_tokens=512", "scheduler=token_budget"],
        ),
        ("--dtype half --seed 3 --enforce-eager", ["model.dtype=float16", "seed=3", "model.cuda_graphs=false"]),
        ("--no-enable-prefix-caching", ["cache.prefix_caching=false"]),
        ("tiny --api-key one two", ["model=tiny", "serve.api_keys=['one','two']"]),
        ("tiny --served-model-name a b", ["model=tiny", "serve.model_name=['a','b']"]),
        ("--served-model-name a * --model tiny", ["serve.model_name=['a','*']", "model=tiny"]),
        ("--served-model-name a tiny", ["serve.model_name='a'", "model=tiny"]),
        ("model=tiny --served-model-name a b", ["model=tiny", "serve.model_name=['a','b']"]),
        ("--model tiny --served-model-name a b", ["model=tiny", "serve.model_name=['a','b']"]),
        ("--gpu-memory-utilization 0.9 --trust-remote-code -q awq tiny", ["model=tiny"]),
        ("-q int8", ["model.quantization=int8"]),
        ("--distributed-executor-backend mp", []),
        ("--kv-cache-dtype fp8_e4m3", ["cache.dtype=fp8"]),
        ("--kv-cache-dtype=auto -O3 -O.mode=3 -cc.mode=1", ["cache.dtype=auto"]),
        (
            "--no-enforce-eager --no-enable-expert-parallel",
            ["model.cuda_graphs=true", "parallel.expert_parallel=false"],
        ),
        ("--cfg job -m --multirun seed=1,2", ["--cfg", "job", "-m", "--multirun", "seed=1,2"]),
        ("--prot 9", ["--prot", "model=9"]),
    ],
)
def test_options_of_vllm_become_keys(words: str, found: list[str]) -> None:
    assert overrides(*words.split()) == found


def test_each_key_that_an_option_becomes_is_one_of_serve() -> None:
    keys = {key for key, _ in dotted_keys(ServeConfig)} | {"model"}
    assert {entry.key for entry in _KEYS.values()} <= keys


def test_a_line_says_which_key_it_is_but_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gapless"):
        overrides("tiny", "--port", "9000", "--api-key", "hidden", "--swap-space", "4")
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines == [
        "--port 9000: is serve.port=9000 here",
        "--api-key: is serve.api_keys here",
        "--swap-space 4: ignored; preempted requests are recomputed, never swapped",
    ]
    assert "tiny: has random weights" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--port"], "--port: missing value"),
        (["--port", "--seed", "3"], "--port: missing value"),
        (["one", "two"], "two: unexpected argument after model one; other arguments are KEY=VALUE"),
        (["--port", "x"], "serve.port='x': must be an integer"),
        (["no/such"], "model.weights=no/such: no such folder"),
        (["--config", "none.yaml"], "serve.config=none.yaml: no such file or directory"),
    ],
)
def test_errors_are_one_line(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *words]) == 2
    last = capfd.readouterr().err.splitlines()[-1].replace(str(tmp_path.parent) + "/", "")
    assert last.startswith("gapless: error: ")
    assert last.removeprefix("gapless: error: ").replace(f"{tmp_path}/", "").startswith(line[:40])


def test_a_file_of_keys_holds_below_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: tiny\nparallel: pp3\nserve:\n  port: 9000\n  api_keys: [one, 'a, b']\nscheduler.chunk: 48\n"
        "tensor-parallel-size: 2\nenable-prefix-caching: false\nmax_model_len: 128\nseed: 5\n"
    )
    found = config(f"serve.config={file}", "seed=7")
    assert (found.model.name, found.model.max_model_len) == ("tiny", 128)
    assert (found.parallel.pp, found.parallel.tp, found.parallel.started_by) == (3, 2, "ray")
    assert (found.serve.port, found.serve.api_keys, found.serve.config) == (9000, ("one", "a, b"), str(file))
    assert (found.scheduler.chunk, found.seed) == (48, 7)  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["- a", "just text", "a: [", "1: 2"])
def test_a_file_that_holds_no_keys_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"serve\.config="):
        overrides(f"serve.config={tmp_path / 'serve.yaml'}")


def test_an_unknown_key_in_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("serve:\n  prot: 9000\n")
    done = gapless("serve", f"serve.config={file}", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gapless: error: serve.prot: unknown key; did you mean 'serve.port'?\n"


def test_a_bare_word_is_a_model_of_any_kind() -> None:
    assert overrides("tiny") == ["model=tiny"]
    assert "tiny" in group_names("model")


@pytest.mark.parametrize("given", [[], ["serve.port=0"], ["model.dtype=float32"], ["serve.model_name=a"]])
def test_a_server_without_a_model_gets_one_that_chats(given: list[str]) -> None:
    assert with_default_model(given) == [*(["model=smollm2"] if is_installed() else []), *given]
    assert f"  model={'smollm2' if is_installed() else 'shipped'} " in help_text(COMMANDS["serve"], "")


@pytest.mark.parametrize(
    "chosen", ["model=tiny", "model.weights=./a", "+model=tiny", "model.architecture.num_layers=2"]
)
def test_a_model_that_is_given_stays(chosen: str) -> None:
    assert with_default_model(["seed=1", chosen]) == ["seed=1", chosen]


def test_the_page_lists_each_option() -> None:
    page = (Path(__file__).parents[2] / "docs/from_vllm.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `--([\w-]+)`[^|]*\| (.*) \|$", page, re.MULTILINE))
    keys = {name: f"`{each.key}={each.says}`" if each.says else f"`{each.key}`" for name, each in _KEYS.items()}
    assert {name: text for name, text in rows.items() if name in keys} == keys
    for section, known in (("## Options", _WITH_VALUE | _ALONE), ("## Not supported", _REFUSED)):
        listed = re.findall(r"^\| ([^|`]+) \| (`--.*) \|$", page.split(section)[1].split("\n## ")[0], re.MULTILINE)
        assert {name: why for why, names in listed for name in re.findall(r"`--([\w-]+)`", names)} == known
    for short, name in _SHORT.items():
        assert re.search(rf"`--{name}`(, `-\w+`)*, `{short}`", page), short


def test_no_option_has_two_answers() -> None:
    tables = (_KEYS, _WITH_VALUE, _ALONE, _REFUSED)
    assert len({name for table in tables for name in table}) == sum(map(len, tables))
    assert {*_SHORT.values()} <= {name for table in tables for name in table}
    assert {*_WRITERS} <= {*_KEYS}


def test_an_option_of_nobody_is_told_apart_from_those_of_vllm(capfd: pytest.CaptureFixture[str]) -> None:
    for words, code, line in (
        ("--turbo-encabulator --cfg job", 2, "--turbo-encabulator: unknown option"),
        ("--moe-backend triton --cfg job", 0, "--moe-backend triton: ignored"),
        ("--sleep-mode-backend x", 2, "not supported: --sleep-mode-backend; gapless has no sleep mode"),
    ):
        assert main(["serve", *words.split()]) == code
        assert line in capfd.readouterr().err


@pytest.mark.parametrize("option", _REFUSED)
@pytest.mark.parametrize("form", ["--{}", "--{}=1"])
def test_what_is_missing_here_is_refused_by_name(option: str, form: str) -> None:
    word = form.format(option)
    with pytest.raises(ConfigError) as error:
        overrides(word, "2")
    assert str(error.value) == f"not supported: --{option}; {_REFUSED[option]}"
    assert overrides(f"--no-{option}") == []


@pytest.mark.parametrize("option", [*_KEYS, *_WITH_VALUE, *_ALONE, *_REFUSED])
def test_a_slip_in_an_option_is_answered_with_it(option: str) -> None:
    if len(option) < 8:
        return
    middle = len(option) // 2
    slip = option[:middle] + option[middle + 1 :]
    with pytest.raises(ConfigError, match="did you mean '--"):
        overrides(f"--{slip}", "1")


def test_a_file_may_switch_off_what_is_missing_here(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("enable-lora: false\nkv-cache-dtype: fp8_e4m3\n")
    assert overrides(f"serve.config={file}") == ["cache.dtype=fp8", f"serve.config={file}"]
    file.write_text("enable-lora: true\n")
    with pytest.raises(ConfigError, match="not supported: enable-lora; gapless loads no LoRA"):
        overrides(f"serve.config={file}")
