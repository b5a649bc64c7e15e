"""Requests in vLLM's and OpenAI's words: defaults of the checkpoint, limits that conflict, names of tokens."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import gapless.models
from gapless import LLM
from gapless.conf.errors import ConfigError
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import ModelConfig
from gapless.launch.cli import main
from gapless.launch.server.endpoints.completions import CompletionAnswer
from gapless.launch.server.requests import CompletionBody
from gapless.models.generation_config import sampling_defaults
from gapless.models.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from gapless.runtime.engine.outputs import CompletionOutput, Logprob
from tests.models.test_tokenizer import llama_like
from tests.support.server import Server, serving

SHIPPED = Path(gapless.models.__path__[0]) / "shipped"
TEMPLATE = "{{ tools | tojson if tools else '' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
DEFAULTS = {"temperature": 0.5, "top_k": 7, "top_p": 0.25, "max_new_tokens": 5, "do_sample": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    shutil.copytree(SHIPPED, folder / "model")
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    (folder / "model/generation_config.json").write_text(json.dumps({"eos_token_id": 0, **DEFAULTS}))
    return folder / "model"


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model.parent, "model=./model") as started:
        yield started


def post(server: Server, path: str, **body: Any) -> Any:
    return httpx2.post(f"{server.url}{path}", json=body).json()


def test_the_checkpoint_s_sampling_values_are_defaults(server: Server) -> None:
    assert "temperature=0.5, top_p=0.25, top_k=7, max_tokens=5, by " in server.log
    answer = post(server, "/v1/responses", input="x", ignore_eos=True)
    assert (answer["temperature"], answer["top_p"], answer["usage"]["output_tokens"]) == (0.5, 0.25, 5)
    answer = post(server, "/v1/responses", input="x", ignore_eos=True, temperature=1, top_p=1, max_output_tokens=6)
    assert (answer["temperature"], answer["top_p"], answer["usage"]["output_tokens"]) == (1, 1, 6)


def test_values_out_of_range_are_no_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"temperature": -1, "top_k": 50.0, "top_p": None, "min_p": "x", "max_new_tokens": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    assert sampling_defaults(ModelConfig(weights="shipped", generation_config=str(tmp_path))) == {"top_k": 50}
    assert [word for word in ("temperature=-1", "min_p='x'", "max_new_tokens=0") if word not in caplog.text] == []
    assert sampling_defaults(ModelConfig(weights="shipped", generation_config=None)) == {}
    assert sampling_defaults(ModelConfig(weights="shipped")) == {}
    with pytest.raises(ConfigError, match=r"generation_config.json: no such file"):
        sampling_defaults(ModelConfig(weights="shipped", generation_config=str(SHIPPED.parent)))


@pytest.mark.parametrize(
    ("command", "given", "right"),
    [
        ("generate", (), {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "max_tokens": 5}),
        ("generate", ("sampling.temperature=0",), {"temperature": 0, "top_p": 0.25, "top_k": 7, "max_tokens": 5}),
        ("generate", ("sampling={top_k:3,max_tokens:2}",), {"temperature": 0.5, "top_k": 3, "max_tokens": 2}),
        ("generate", ("-m", "seed=1", "sampling.top_k=4"), {"temperature": 0.5, "top_k": 4, "max_tokens": 5}),
        ("generate", ("model.generation_config=null",), {"temperature": 0.0, "top_p": 1.0, "top_k": 0}),
        ("chat", ("sampling.top_p=1",), {"temperature": 0.5, "top_p": 1, "max_tokens": 5}),
    ],
)
def test_commands_take_the_checkpoint_s_values_but_for_those_given(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    given: tuple[str, ...],
    right: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n"))
    prompt = ["prompt=x", "print_texts=false"] if command == "generate" else []
    assert main([command, f"model={model}", "parallel.threads=1", *prompt, *given]) == 0
    (summary,) = tmp_path.rglob("summary.json")
    config = json.loads(summary.read_text())["config"]
    assert {name: config["sampling"][name] for name in right} == right
    assert config["model"]["generation_config"] is None  # so that the recorded config is whole
    is_said = "sampling defaults: temperature=0.5, top_p=0.25, top_k=7, max_tokens=5, by " in capfd.readouterr().err
    assert is_said == ("model.generation_config=null" not in given)


def test_llm_takes_the_checkpoint_s_values_where_it_is_given_none(model: Path) -> None:
    with LLM(model) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.25, 7, 5)
        (output,) = llm.generate("x")
        assert len(output.outputs[0].token_ids) <= 5
        (given,) = llm.generate("x", SamplingParams(max_tokens=7, ignore_eos=True))
        assert len(given.outputs[0].token_ids) == 7
    with LLM(model, **{"model.generation_config": None}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_tokenize_counts_tools_as_chats_do(server: Server) -> None:
    for tools in ([], [TOOL]):
        found = post(server, "/tokenize", messages=CHAT, tools=tools)
        usage = post(server, "/v1/chat/completions", messages=CHAT, tools=tools, max_tokens=1)["usage"]
        assert found["count"] == len(found["tokens"]) == usage["prompt_tokens"]
    assert httpx2.get(f"{server.url}/tokenizer_info").json()["tokenizer_class"]


@pytest.mark.parametrize(
    "given",
    [
        {"guided_choice": ["yes", "yes"]},
        {"guided_regex": "yes"},
        {"guided_json": {"const": "yes"}},
        {"guided_grammar": 'start: "yes"'},
    ],
)
def test_older_names_of_structured_outputs(server: Server, given: dict[str, Any]) -> None:
    answer = post(server, "/v1/completions", prompt="x", **given)
    assert answer["choices"][0]["text"].strip('"') == "yes"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"allowed_token_ids": [300], "structured_outputs": {"choice": ["yes"]}}, ("allowed_token_ids", "structured_")),
        ({"bad_words": ["yes"], "guided_json": {"const": "yes"}}, ("bad_words", "structured_outputs")),
        ({"min_tokens": 9, "structured_outputs": {"choice": ["yes"]}}, ("min_tokens", "structured_outputs")),
        ({"allowed_token_ids": [0], "min_tokens": 1}, ("allowed_token_ids", "min_tokens")),
        ({"allowed_token_ids": []}, ("allowed_token_ids", "non-empty")),
        ({"repetition_penalty": 1e-38}, ("repetition_penalty",)),
        ({"temperature": 1e-40}, ("temperature",)),
        ({"presence_penalty": 1e39}, ("presence_penalty",)),
        ({"logit_bias": {"1": 1e39}}, ("logit_bias",)),
    ],
)
def test_limits_that_no_output_follows(server: Server, given: dict[str, Any], names: tuple[str, ...]) -> None:
    answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x", **given})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, names[0]), error
    assert [name for name in names if name not in error["message"]] == []


def test_limits_offline() -> None:
    with LLM("shipped") as llm, pytest.raises(ConfigError, match="allowed_token_ids: min_tokens forbids all of them"):
        llm.generate(["x"], SamplingParams(allowed_token_ids=(0,), min_tokens=1))


def test_the_lowest_bias_forbids_no_token() -> None:
    params = SamplingParams(allowed_token_ids=(5, 6), logit_bias={5: -100, 6: -100}, max_tokens=3)
    with LLM("shipped") as llm:
        assert set(llm.generate(["x"], params)[0].outputs[0].token_ids) <= {5, 6}


def test_no_two_tokens_have_one_name() -> None:
    tokenizer = load_tokenizer(SHIPPED, 2048)
    for by_id in (False, True):
        body = CompletionBody(prompt="x", logprobs=1, return_tokens_as_token_ids=by_id)
        answer = CompletionAnswer("m", [[1]], body, tokenizer, None)
        found = {token: Logprob(-token, token, tokenizer.decode([token], skip_special=False)) for token in range(2048)}
        output = CompletionOutput(0, token_ids=[9], logprobs=[found], finish_reason="length")
        columns = json.loads(answer.whole([output], {}))["choices"][0]["logprobs"]
        (top,), (name,), (value,) = columns["top_logprobs"], columns["tokens"], columns["token_logprobs"]
        assert (len(top), top[name]) == (2048, value)
        assert (name == "token_id:9") == by_id
    spaced = FileTokenizer(llama_like(), 512)
    tokens = range(3, 259)
    answer = CompletionAnswer("m", [[1]], CompletionBody(prompt="x"), spaced, None)
    names = answer._names(3, {token: Logprob(-1.0, 1, spaced.decode([token], skip_special=False)) for token in tokens})
    right = [chr(byte) if byte < 0x80 else f"bytes:\\x{byte:02x}" for byte in range(256)]
    assert [names[token] for token in tokens if token != 3 + 32] == [*right[:32], *right[33:]]
    assert len(set(names.values())) == 256
    plain = ByteTokenizer(300)
    answer = CompletionAnswer("m", [[1]], CompletionBody(prompt="x"), plain, None)
    others = {token: Logprob(-1.0, 1, plain.decode([token], skip_special=False)) for token in (65, 256, 257)}
    names = answer._names(0xF0, others)
    assert names == {0xF0: "bytes:\\xf0", 65: "A", 256: "bytes:", 257: "bytes: (token_id:257)"}
