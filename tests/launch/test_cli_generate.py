"""`gapless generate` as a process: prompts in, a run folder out, and nothing left behind when it is stopped."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import subprocess
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from gapless.conf.errors import ConfigError
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import GenerateConfig, ModelConfig
from gapless.launch import progress
from gapless.launch.prompts import Prompt, read_prompts
from gapless.runtime.pipeline.start_parts import READY
from tests.support.forked import Process, gapless, main
from tests.support.tiers import HANGS_S, first_quick

SMALL = ["model=tiny", "cache.num_blocks=64", "parallel.threads=1"]


class Input:
    def __init__(self, text: str | None = None) -> None:
        self.is_terminal = text is None
        self.data = (text or "").encode()


def prompts_of(text: str | None = None, **keys: Any) -> list[Prompt]:
    return read_prompts(GenerateConfig(model=ModelConfig(weights="shipped"), **keys), Input(text))


def jsonl(folder: Path, text: str) -> str:
    path = folder / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    return str(path)


def generate(*arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return gapless("generate", *SMALL, *arguments, cwd=cwd, stdin=stdin)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("rows", "warns"), [(['"max_tokens": 4', '"max_tokens": 5'], True), (['"max_tokens": 4', '"seed": 1'], False)]
)
def test_a_key_that_each_row_overrides_is_warned_of(
    rows: list[str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    text = "\n".join(f'{{"prompt": "x", {row}}}' for row in rows)
    prompts_of(text)
    assert not caplog.messages
    prompts_of(text, sampling=SamplingParams(max_tokens=16))
    assert caplog.messages == ["sampling.max_tokens=16: overridden by every row of standard input"] * warns


def test_a_start_says_what_it_went_into_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    began = time.monotonic()
    with progress.starting(Console(file=io.StringIO()), GenerateConfig(model=ModelConfig(weights="shipped"))) as report:
        time.sleep(0.2)
        report("0 of 2 ranks started")
        time.sleep(0.1)
        report(f"{READY} 0.1 s; the slowest of each part: weights 0.1 s (rank 1)")
    last = caplog.messages[-1]
    assert last.endswith("; ranks are ready after 0.1 s; the slowest of each part: weights 0.1 s (rank 1)")
    whole, imports, launcher = map(float, re.findall(r"([\d.]+) s", last)[:3])
    assert imports > 0
    assert 0.2 <= launcher < whole - imports + 0.15 < time.monotonic() - began + 0.4  # each is rounded
    assert caplog.text.count("start took") == 1


def test_a_run_leaves_its_folder_and_prints_its_texts(tmp_path: Path) -> None:
    done = generate("prompt=Hello, world (=x)", "sampling.max_tokens=4", "sampling.logprobs=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in run.iterdir()} == {
        ".hydra",
        "outputs.jsonl",
        "requests.csv",
        "spans.csv.gz",
        "record.jsonl.gz",
        "summary.json",
        "trace.json.gz",
        "report.html",
    }
    assert {path.name for path in (run / ".hydra").iterdir()} == {"config.yaml", "overrides.yaml", "hydra.yaml"}
    assert yaml.safe_load((run / ".hydra" / "config.yaml").read_text())["prompt"] == "Hello, world (=x)"
    (row,) = rows(run / "outputs.jsonl")
    assert (row["index"], row["prompt"]) == (0, "Hello, world (=x)")
    (output,) = row["outputs"]
    assert len(output["token_ids"]) == len(output["logprobs"]) == 4
    assert str(output["token_ids"][0]) in output["logprobs"][0]
    assert output["finish_reason"] == "length"
    assert json.loads((run / "summary.json").read_text())["total_output_tokens"] == 4
    assert json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))
    assert "Hello, world (=x)" in done.stdout
    for name in ("outputs.jsonl", "report.html"):
        assert str(run.relative_to(tmp_path) / name) in done.stdout
    assert "1/1 requests, 4 tokens" in done.stderr


def test_lines_of_standard_input_come_back_in_their_order(tmp_path: Path) -> None:
    overrides = ["sampling.n=2", "sampling.max_tokens=3", "outputs=o u,t.jsonl", "hydra.run.dir=here"]
    done = generate(*overrides, "print_texts=false", cwd=tmp_path, stdin="\ufeffone\n\ntwo two\r\n  three\n")
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "o u,t.jsonl")
    assert [(row["index"], row["prompt"]) for row in found] == [(0, "one"), (1, "two two"), (2, "  three")]
    assert all([output["index"] for output in row["outputs"]] == [0, 1] for row in found)
    assert (tmp_path / "here" / "report.html").is_file()
    assert not (tmp_path / "runs").exists()


def test_jsonl_rows_set_their_own_sampling_and_finish_out_of_order(tmp_path: Path) -> None:
    name = jsonl(tmp_path, '{"prompt": "a", "max_tokens": 9}\n{"prompt_token_ids": [5, 6, 7], "max_tokens": 2}\n')
    done = generate(f"prompts={name}", "sampling.ignore_eos=true", "outputs=o.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "o.jsonl")
    assert [(row["index"], row["num_prompt_tokens"], len(row["outputs"][0]["token_ids"])) for row in found] == [
        (0, 1, 9),
        (1, 3, 2),
    ]


def test_a_sweep_leaves_a_folder_a_point(tmp_path: Path) -> None:
    done = generate("-m", "scheduler=sarathi,orca_best", "prompt=a,b", "sampling.max_tokens=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "multirun").iterdir()
    policies = [yaml.safe_load((sweep / n / ".hydra" / "config.yaml").read_text())["scheduler"]["name"] for n in "01"]
    assert policies == ["sarathi", "orca_best"]
    texts = [rows(sweep / n / "outputs.jsonl") for n in "01"]
    assert texts[0] == texts[1]
    assert texts[0][0]["prompt"] == "a,b"


@pytest.mark.slow
def test_runs_started_at_once_have_a_folder_each(tmp_path: Path) -> None:
    def start(prompt: str) -> Process:
        command = ["generate", *SMALL, f"prompt={prompt}", "sampling.max_tokens=2", "print_texts=false"]
        return Process(main, command, cwd=tmp_path)

    assert [process.wait(HANGS_S) for process in [start(prompt) for prompt in "ab"]] == [0, 0]
    prompts = [rows(run / "outputs.jsonl")[0]["prompt"] for run in (tmp_path / "runs").iterdir()]
    assert sorted(prompts) == ["a", "b"]


def test_a_prompt_longer_than_the_context_is_one_line(tmp_path: Path) -> None:
    done = generate("prompt=" + "word " * 40, "model.max_model_len=32", cwd=tmp_path)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "error" in line] == [done.stderr.splitlines()[-1]]
    assert "32" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_without_a_traceback(sent: signal.Signals, code: int, tmp_path: Path) -> None:
    long = ["sampling.max_tokens=400", "sampling.n=8", "sampling.ignore_eos=true", "cache.num_blocks=512"]
    with (tmp_path / "errors").open("w") as errors:
        process = Process(main, ["generate", *SMALL, *long, "prompt=x", "outputs=o.jsonl"], cwd=tmp_path, stderr=errors)
    try:
        end = time.monotonic() + HANGS_S
        while not (tmp_path / "o.jsonl").exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(sent)
        assert process.wait(HANGS_S) == code
    finally:
        process.kill()
    said = (tmp_path / "errors").read_text()
    assert "Traceback" not in said
    assert ("gapless: interrupted" in said) is (sent is signal.SIGINT)


def test_prompts_from_each_source(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=7)
    text = tmp_path / "p.txt"
    text.write_bytes("\ufeffeins\r\n\r\n zwei \n".encode())
    assert prompts_of(prompts=str(text), sampling=params) == [
        Prompt("eins", None, params),
        Prompt(" zwei ", None, params),
    ]
    name = jsonl(tmp_path, '{"prompt": "a", "stop": ["x"], "top_k": 3}\n\n{"prompt_token_ids": [1, 2]}\n')
    assert prompts_of(prompts=name, sampling=params) == [
        Prompt("a", None, SamplingParams(max_tokens=7, stop=("x",), top_k=3)),
        Prompt(None, (1, 2), params),
    ]
    assert prompts_of("line\u2028one\nb", sampling=params)[0].text == "line\u2028one"
    assert prompts_of(prompt="x\ny", sampling=params) == [Prompt("x\ny", None, params)]
    assert len(prompts_of(prompts="shipped")) >= 2


@pytest.mark.parametrize(
    "text",
    [
        '["a", "b c"]',
        '[\n "a",\n "b c"\n]\n',
        '["a",\n{"prompt": "b c"}]',
        '{"prompt": "a"}\n\n{"prompt": "b c"}',
        '{\n "prompt": "a"\n}\n{\n "prompt": "b c"\n}\n',
        '\ufeff\n{"prompt": "a"}\r\n{"prompt": "b c"}\r\n',
    ],
)
@pytest.mark.parametrize("name", ["p.json", "P.JSONL", "p.txt", "p.jsonl.gz", ""])
def test_prompts_as_json_are_known_by_what_they_are(text: str, name: str, tmp_path: Path) -> None:
    if name:
        raw = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    found = prompts_of(prompts=str(tmp_path / name)) if name else prompts_of(text)
    assert [prompt.text for prompt in found] == ["a", "b c"]


def test_prompts_that_look_like_json_stay_text(tmp_path: Path) -> None:
    lines = ["[1, 2] is a list", '{"a": 1}', "[x for x in range(3)]", "[]"]
    for first in range(len(lines)):
        given = lines[first:] + lines[:first]
        assert [prompt.text for prompt in prompts_of("\n".join(given))] == given


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "1: not JSON: Expecting property name enclosed in double quotes at column 2"),
        ('{"prompt": "a"}\n[1]', '2: must be an object such as {"prompt": "..."}'),
        ('{"prompt": "a", "temprature": 1}', "1: temprature: unknown key; did you mean 'temperature'?"),
        ('{"prompt": ""}', "1: prompt='': must be a non-empty string"),
        ('{"prompt": 3}', "1: prompt=3: must be a non-empty string"),
        ("{}", "1: give one of prompt, messages and prompt_token_ids"),
        ('{"top_k": 3}', "1: give one of prompt, messages and prompt_token_ids; found top_k"),
        ('{"data": [{"prompt": "a"}]}', "1: give one of prompt, messages and prompt_token_ids; found data"),
        (
            '[{"question_id": 1, "turns": ["a"]}]',
            "1: give one of prompt, messages and prompt_token_ids; found question_id, turns",
        ),
        (
            '{"conversations": []}',
            "1: give one of prompt, messages and prompt_token_ids; found conversations (use workload="
            "sharegpt for ShareGPT files)",
        ),
        ('{"prompts": "a"}', "1: prompts: unknown key; did you mean 'prompt'?"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "1: give one of prompt, messages and prompt_token_ids"),
        ('{"prompt_token_ids": []}', "1: prompt_token_ids: must be a non-empty list of token ids"),
        ('{"prompt_token_ids": [true]}', "1: prompt_token_ids: must be a non-empty list of token ids"),
        ('{"prompt": "a", "top_k": "3"}', "1: sampling.top_k='3': must be an integer"),
        ('{"prompt": "a", "top_p": 0}', "1: sampling.top_p=0.0: must be above 0, at most 1"),
        ("[" * 100_000, "1: not JSON: nested too deeply"),
    ],
)
def test_a_bad_line_of_jsonl_is_named(text: str, line: str, tmp_path: Path) -> None:
    name = jsonl(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        prompts_of(prompts=name)
    assert str(caught.value) == f"{name}:{line}"


def test_files_that_hold_no_prompts(tmp_path: Path) -> None:
    for name, content, line in [
        ("latin.txt", "é".encode("latin-1"), "not UTF-8"),
        ("empty.txt", b"", "has no prompts"),
        ("empty.jsonl", b"\n", "has no prompts"),
        ("p.csv", b"id,Prompt,max_tokens\n1,a,3\n", r"p\.csv:1: looks like a CSV header"),
        ("p.jsonl", b"PAR1\x15", "a Parquet file"),
        ("p.txt.gz", gzip.compress(b"a\nb\n" * 100)[:-9], "a damaged .gz"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=line):
            prompts_of(prompts=str(tmp_path / name))


def test_a_pipe_is_named_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe: a pipe; redirect it to standard input"):
        prompts_of(prompts=str(tmp_path / "pipe"))


def test_a_terminal_without_prompts_says_how_to_give_them() -> None:
    with pytest.raises(ConfigError, match=r"^no prompts; give prompt=.*prompts=FILE.*pipe"):
        prompts_of()


def test_outputs_never_overwrite_what_is_needed(tmp_path: Path) -> None:
    prompts = jsonl(tmp_path, '{"prompt": "x"}\n')
    done = generate(f"prompts={prompts}", "outputs=./p.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "gapless: error: outputs=./p.jsonl: is the file of prompts; choose another path\n"
    swept = generate("-m", "scheduler=sarathi,orca_best", "prompt=x", "outputs=o.jsonl", cwd=tmp_path)
    assert swept.returncode == 2
    assert swept.stderr.startswith("gapless: error: outputs=o.jsonl: all runs of the sweep would write to it")
    assert [path.name for path in tmp_path.iterdir()] == ["p.jsonl"]


BRIEF = ["prompt=x", "sampling.max_tokens=2", "print_texts=false"]


@pytest.mark.parametrize("mode", first_quick(["a", "w"]))
@pytest.mark.parametrize(
    ("name", "stream"),
    [
        ("/dev/stdout", "stdout"),
        pytest.param("/proc/self/fd/1", "stdout", marks=pytest.mark.slow),
        pytest.param("link", "stdout", marks=pytest.mark.slow),
        pytest.param("log", "stdout", marks=pytest.mark.slow),
        ("log", "stderr"),
    ],
)
def test_outputs_beside_other_text_lose_none_of_it(name: str, stream: str, mode: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("from before\n")
    (tmp_path / "link").symlink_to("log")
    with log.open(mode) as file, (tmp_path / "other").open("w") as other:
        streams = {"stdout": other, "stderr": other} | {stream: file}
        assert Process(main, ["generate", *SMALL, *BRIEF, f"outputs={name}"], cwd=tmp_path, **streams).wait() == 0
    lines = log.read_text().splitlines()
    assert (lines[0] == "from before") is (mode == "a")
    assert len([line for line in lines if line.startswith('{"index": 0, ')]) == 1
    said = "tok/s" if stream == "stdout" else "loading the model"
    assert any(said in line for line in lines)


def test_outputs_into_a_pipe_reach_its_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE)
    assert generate(*BRIEF, "outputs=pipe", cwd=tmp_path).returncode == 0
    text, _ = reader.communicate(timeout=HANGS_S)
    assert json.loads(text)["index"] == 0
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_of_the_user_s_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")
    done = generate(*BRIEF, "outputs=notes.txt", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "gapless: error: outputs=notes.txt: not a gapless outputs file; choose another path\n",
    )
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


def test_outputs_replace_earlier_ones_behind_a_link(tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    old.write_text('{"index": 0, "prompt": "earlier"}\n')
    old.chmod(0o640)
    (tmp_path / "link").symlink_to("old.jsonl")
    prompts = jsonl(tmp_path, '{"prompt": "a", "max_tokens": 40, "ignore_eos": true}\n{"prompt": "b"}\n')
    done = generate(f"prompts={prompts}", "sampling.max_tokens=2", "outputs=link", "print_texts=false", cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert [row["prompt"] for row in rows(old)] == ["a", "b"]
    assert old.stat().st_mode & 0o777 == 0o640


def test_rows_that_no_file_can_hold_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for text, line in [
        ('{"prompt": "a"}\n{"prompt": "a\\ud800b"}', "2: prompt: has an unpaired surrogate"),
        ('{"prompt": "a", "stop": ["\\udfff"]}', "1: sampling.stop='\\udfff': must be valid UTF-8 text"),
        ('{"prompt": "a", "prompt": "b"}', "1: duplicate key 'prompt'"),
        ('{"prompt": "a", "top_k": 3, "top_k": 4}', "1: duplicate key 'top_k'"),
        ('{"prompt": "a", "max_tokens": 12345678901234567890}', "1: sampling.max_tokens=12345678901234567890: must be"),
        ('{"prompt": "a", "seed": 12345678901234567890}', "1: sampling.seed=12345678901234567890: must be null or"),
        ('{"prompt": "a", "temperature": Infinity}', "1: sampling.temperature=inf: must be a finite number"),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "1: not JSON: a number has too many digits"),
    ]:
        name = jsonl(tmp_path, text)
        with pytest.raises(ConfigError) as caught:
            prompts_of(prompts=name)
        assert str(caught.value).startswith(f"{name}:{line}")
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl:2: not UTF-8 \(invalid start byte at byte 12\)"):
        prompts_of(prompts=str(tmp_path / "bad.jsonl"))


def test_a_line_of_100_mb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    for name in ("long.txt", "long.jsonl"):
        (tmp_path / name).write_bytes(b'{"prompt": "' + b"a " * 50_000_000 + b'"}\n')
        tracemalloc.start()
        with pytest.raises(ConfigError, match=r"long.*:1: longer than 16 MiB"):
            prompts_of(prompts=str(tmp_path / name))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50_000_000
    with pytest.raises(ConfigError, match="not a regular file"):
        prompts_of(prompts="/dev/zero")


def test_a_full_disk_names_the_key_and_keeps_what_is_finished(tmp_path: Path) -> None:
    done = generate("prompt=x", "sampling.max_tokens=2", "outputs=/dev/full", "hydra.run.dir=r", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "gapless: error: outputs=/dev/full: no space left on device; 1 finished outputs are saved in r/outputs.jsonl"
    )
    assert len(rows(tmp_path / "r" / "outputs.jsonl")) == 1


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("hydra.run.dir=file", "hydra.run.dir=file: file is a file; give a folder"),
        ("hydra.run.dir=file/below", "file is a file; give a folder"),
        ("outputs=/proc/x", "outputs=/proc/x: "),
        ("outputs=/sys/x", "outputs=/sys/x: "),
    ],
)
def test_what_cannot_be_written_is_named_before_the_start(override: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    done = generate("prompt=x", override, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert line in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "kept"


POLICY = """
from gapless.runtime.scheduler import Scheduler
from gapless.conf.policies import SchedulerConfig


class Mine(Scheduler):
    def {method}(self, *arguments):
        raise {error}("boom")
"""


@pytest.mark.parametrize("method", first_quick(["fill", "__init__"]))
@pytest.mark.parametrize("error", ["ValueError", "KeyError"])
def test_an_error_in_a_policy_names_its_line(method: str, error: str, tmp_path: Path) -> None:
    text = POLICY.format(method=method, error=error)
    if method != "fill":
        text += "\n    def fill(self, batch):\n        pass\n"
    (tmp_path / "mine.py").write_text(text)
    done = generate("prompt=x", "scheduler=./mine.py", cwd=tmp_path)
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"gapless: error: {tmp_path / 'mine.py'}:8: in Mine.{method}: {error}: ")
    assert "boom" in said
    assert "Traceback" not in done.stderr


def test_weights_of_nan_end_in_an_error(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from tests.support.hf_models import make_model

    model = make_model("llama", tmp_path)
    tensors = {name: torch.full_like(t, torch.nan) for name, t in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    name = jsonl(tmp_path, '{"prompt_token_ids": [1, 2]}\n{"prompt_token_ids": [3], "temperature": 1, "logprobs": 2}\n')
    done = generate(f"model={tmp_path}", "model.tokenizer=none", f"prompts={name}", "outputs=o.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert "non-finite logits for 2 of 2 prompts (first: prompt 0)" in done.stderr.splitlines()[-1]
    assert [row["outputs"][0]["finish_reason"] for row in rows(tmp_path / "o.jsonl")] == ["error", "error"]
