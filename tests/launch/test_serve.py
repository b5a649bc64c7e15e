"""The server: real HTTP, the real engine behind it, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import langchain_openai
import openai
import pytest

import gapless.models
from benchmarks.malformed import malformed
from gapless import LLM
from gapless.conf.sampling import SamplingParams
from gapless.kernels.processor import multiplies_bfloat16
from tests.support.processes import assert_gone, descendants_of
from tests.support.server import Server, serving
from tests.support.tiers import HANGS_S

PROMPT = "import os\n"
SHIPPED = Path(gapless.models.__path__[0]) / "shipped"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    program = ("gapless.launch.cli",)  # as users start it
    with serving(tmp_path_factory.mktemp("serve"), "serve.max_body_mib=1", program=program) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM("shipped") as llm:
        yield llm


def test_a_completion_is_what_the_engine_gives_offline(client: openai.OpenAI, offline: LLM) -> None:
    (expected,) = offline.generate([PROMPT], SamplingParams(max_tokens=12))
    answer = client.completions.create(model="shipped", prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_a_stream_has_an_event_for_each_token(client: openai.OpenAI, offline: LLM) -> None:
    (expected,) = offline.generate([PROMPT], SamplingParams(max_tokens=12))
    chunks = list(
        client.completions.create(
            model="shipped",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    *tokens, usage = chunks
    assert [chunk.choices[0].token_ids for chunk in tokens] == [[t] for t in expected.outputs[0].token_ids]
    assert "".join(chunk.choices[0].text for chunk in tokens) == expected.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in tokens][-1] == expected.outputs[0].finish_reason
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(tokens)


def test_langchain_reads_completions_and_streams(server: Server, offline: LLM) -> None:
    (expected,) = offline.generate([PROMPT], SamplingParams(max_tokens=12))
    model = langchain_openai.OpenAI(
        model="shipped", base_url=f"{server.url}/v1", api_key="none", max_tokens=12, temperature=0
    )
    assert model.invoke(PROMPT) == expected.outputs[0].text
    pieces = list(model.stream(PROMPT))
    assert len(pieces) > 2
    assert "".join(pieces) == expected.outputs[0].text


def test_several_prompts_and_outputs(client: openai.OpenAI, offline: LLM) -> None:
    prompts = [PROMPT, "class A:\n"]
    expected = offline.generate(prompts, SamplingParams(max_tokens=6, n=2, temperature=0.8, seed=5))
    answer = client.completions.create(model="shipped", prompt=prompts, max_tokens=6, n=2, temperature=0.8, seed=5)
    assert [choice.text for choice in answer.choices] == [o.text for each in expected for o in each.outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = offline.tokenizer.encode(PROMPT)
    of_ids = client.completions.create(model="shipped", prompt=ids, max_tokens=6, temperature=0, echo=True)
    assert of_ids.choices[0].text.startswith(offline.tokenizer.decode(ids))


def test_stop_strings_and_logprobs(client: openai.OpenAI, offline: LLM) -> None:
    params = SamplingParams(max_tokens=40, stop=("\n",), logprobs=2)
    (expected,) = offline.generate([PROMPT], params)
    answer = client.completions.create(
        model="shipped", prompt=PROMPT, max_tokens=40, temperature=0, stop="\n", logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text == expected.outputs[0].text
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    found = expected.outputs[0].logprobs
    assert found is not None
    values = [each[token].logprob for token, each in zip(expected.outputs[0].token_ids, found, strict=True)]
    assert choice.logprobs.token_logprobs == pytest.approx(values, abs=1e-4)
    pieces = client.completions.create(
        model="shipped", prompt=PROMPT, max_tokens=40, temperature=0, stop="\n", stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in pieces) == choice.text


def test_biases(server: Server, client: openai.OpenAI, offline: LLM) -> None:
    line, space = offline.tokenizer.encode("\n"), offline.tokenizer.encode(" ")
    answer = client.completions.create(
        model="shipped", prompt=PROMPT, max_tokens=4, temperature=0, logit_bias={str(line[0]): 100}
    )
    assert answer.choices[0].text == "\n" * 4
    (of_ids,) = offline.generate([PROMPT], SamplingParams(max_tokens=4, logit_bias={line[0]: 100.0}))
    assert of_ids.outputs[0].text == "\n" * 4
    answer = client.completions.create(
        model="shipped", prompt=PROMPT, max_tokens=9, extra_body={"allowed_token_ids": [line[0], space[0]]}
    )
    assert set(answer.choices[0].text) <= {"\n", " "}
    (plain,) = offline.generate([PROMPT], SamplingParams(max_tokens=24))
    word = plain.outputs[0].text.split()[1]
    answer = client.completions.create(
        model="shipped", prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"bad_words": [word]}
    )
    (other,) = offline.generate([PROMPT], SamplingParams(max_tokens=24, bad_words=(word,)))
    assert answer.choices[0].text == other.outputs[0].text
    assert f" {word}" not in answer.choices[0].text


def test_prompts_are_cut_and_special_tokens_shown(server: Server, client: openai.OpenAI, offline: LLM) -> None:
    ids = offline.tokenizer.encode(PROMPT)
    wanted: dict[str, Any] = {"model": "shipped", "max_tokens": 6, "temperature": 0}
    (end,) = offline.plan.arch.eos_token_ids
    for most, kept in ((3, ids[-3:]), (10_000, ids), (-1, ids)):
        answer = client.completions.create(prompt=PROMPT, extra_body={"truncate_prompt_tokens": most}, **wanted)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(kept)
        (expected,) = offline.generate([kept], SamplingParams(max_tokens=6))
        assert answer.choices[0].text == expected.outputs[0].text
    long = [ids[0]] * (offline.max_model_len + 7)
    answer = client.completions.create(prompt=long, echo=True, extra_body={"truncate_prompt_tokens": -1}, **wanted)
    assert answer.usage is not None
    assert answer.usage.total_tokens == offline.max_model_len
    for skip in (True, False):
        further = {"skip_special_tokens": skip, "ignore_eos": True, "allowed_token_ids": [end]}
        answer = client.completions.create(prompt=PROMPT, extra_body=further, **wanted)
        assert answer.choices[0].text == offline.tokenizer.decode([end] * 6, skip_special=skip)
    assert answer.choices[0].text


def test_echo_with_logprobs(server: Server, client: openai.OpenAI, offline: LLM) -> None:
    """As lm-evaluation-harness asks: the log-probabilities of prompts of token ids, with one token or none beside."""
    text = "def main(x):\n    return x\n"
    (expected,) = offline.generate([text], SamplingParams(max_tokens=1, prompt_logprobs=1))
    ids, found = expected.prompt_token_ids, expected.prompt_logprobs or []
    values = [each[token].logprob for token, each in zip(ids, found, strict=True) if each is not None]
    for max_tokens in (0, 1):
        answer = client.completions.create(
            model="shipped",
            prompt=[ids, ids[:1]],
            max_tokens=max_tokens,
            logprobs=1,
            echo=True,
            temperature=0,
            extra_body={"prompt_logprobs": 0},
        )
        whole, one = answer.choices
        assert whole.logprobs is not None
        assert whole.logprobs.token_logprobs is not None
        assert whole.logprobs.token_logprobs[0] is None
        assert whole.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(values, abs=1e-4)
        assert len(whole.logprobs.tokens or []) == len(ids) + max_tokens
        assert "".join((whole.logprobs.tokens or [])[: len(ids)]) == text
        assert whole.text.startswith(text)
        assert (whole.text == text) == (max_tokens == 0)
        assert one.logprobs is not None
        assert len(one.logprobs.token_logprobs or []) == 1 + max_tokens
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2 * max_tokens
        by_id = whole.model_extra["prompt_logprobs"] if whole.model_extra else []
        own = [by_id[place][str(token)]["logprob"] for place, token in enumerate(ids) if place]
        assert own == pytest.approx(values, abs=1e-4)
        events = list(
            client.completions.create(
                model="shipped", prompt=text, max_tokens=max_tokens, logprobs=1, echo=True, temperature=0, stream=True
            )
        )
        streamed = [event.choices[0].logprobs for event in events]
        by_events = [n for each in streamed if each for n in each.token_logprobs or []]
        assert by_events[1:] == pytest.approx(whole.logprobs.token_logprobs[1:], abs=1e-4)
        assert [n for each in streamed if each for n in each.text_offset or []] == whole.logprobs.text_offset


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_structured_outputs(server: Server, client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "one", "strict": True, "schema": SCHEMA}}
    answer = client.completions.create(
        model="shipped",
        prompt=[PROMPT, "def f(x):\n"],
        n=2,
        max_tokens=60,
        seed=3,
        extra_body={"response_format": form},
    )
    for choice in answer.choices:
        assert set(json.loads(choice.text)) == {"name", "ok"}
        assert choice.finish_reason == "stop"
    pieces = client.completions.create(
        model="shipped",
        prompt=PROMPT,
        max_tokens=20,
        stream=True,
        logprobs=3,
        extra_body={"structured_outputs": {"choice": ["yes", "no"], "regex": None}},
    )
    assert "".join(chunk.choices[0].text for chunk in pieces) in ("yes", "no")
    form["json_schema"]["schema"] = {"type": "object", "uniqueItems": 5}
    answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "x", "response_format": form})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"


def test_models_tokens_and_versions(server: Server, client: openai.OpenAI, offline: LLM) -> None:
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve(model.id).id == "shipped"
    found = httpx2.post(f"{server.url}/tokenize", json={"prompt": PROMPT}).json()
    assert found["tokens"] == offline.tokenizer.encode(PROMPT)
    assert found["max_model_len"] == offline.max_model_len
    text = httpx2.post(f"{server.url}/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert text == offline.tokenizer.decode(found["tokens"], skip_special=False)
    assert "version" in httpx2.get(f"{server.url}/version").json()


COMPLEX = {"grammar": "start: /" + "a?" * 700 + "/"}
WRONG: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", b"{", 400, "not JSON"),
    ("/v1/completions", b"", 400, "not JSON"),
    ("/v1/completions", b"[" * 100_000, 400, "not JSON"),
    ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, "not JSON"),
    ("/v1/completions", [], 400, "body"),
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", {"prompt": 5}, 400, "prompt"),
    ("/v1/completions", {"prompt": ""}, 400, "empty"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1 << 40]}, 400, "token id"),
    ("/v1/completions", {"prompt": [-1]}, 400, "token id"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**30}, 400, "maximum context length"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 1 << 20}, 400, "maximum context length"),
    ("/v1/completions", {"prompt": "x" * 900_000}, 400, "maximum context length"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "temperature": "1"}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "n": 1000}, 400, "n:"),
    ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
    ("/v1/completions", {"prompt": "x", "seed": 1 << 80}, 400, "seed"),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [1 << 20]}, 400, "stop_token_ids"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 101}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": [-1]}, 400, "allowed_token_ids"),
    ("/v1/completions", {"prompt": "x", "bad_words": [" "]}, 400, "bad_words"),
    ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    ("/v1/completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {}}, 400, "found none"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regexp": "a"}}, 400, "regex"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "[a-"}}, 400, "unclosed character class"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": {"$ref": "#"}}}, 400, "no text matches"),
    ("/v1/completions", {"prompt": "x", "min_tokens": 2, "structured_outputs": COMPLEX}, 400, "too complex during"),
    ("/v1/completions", {"prompt": "x", "guided_regex": "[a-"}, 400, "unclosed character class"),
    ("/v1/completions", {"prompt": "x", "response_format": {"type": "json_schema"}}, 400, "json_schema"),
    ("/v1/completions", {"prompt": "x", "response_format": {"type": "yaml"}}, 400, "response_format"),
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "other"),
    ("/v1/completions", {"prompt": "x" * (1 << 21)}, 413, "max_body_mib"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 400, "chat template"),
    ("/detokenize", {"tokens": [-1]}, 400, "token id"),
    ("/nothing", {}, 404, "/nothing"),
]


@pytest.mark.parametrize(("path", "body", "status", "word"), WRONG)
def test_what_is_wrong_is_said(server: Server, path: str, body: Any, status: int, word: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx2.post(server.url + path, content=content)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert word in error["message"]


def running(server: Server) -> float:
    text = httpx2.get(f"{server.url}/metrics").text
    return float(re.findall(r"^gapless:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)[0])


def test_a_client_that_goes_frees_its_blocks(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    server.until(lambda: not running(server) and not httpx2.get(f"{server.url}/load").json()["server_load"])


def test_the_first_line_has_threads_and_cores(server: Server) -> None:
    assert re.search(r"KV cache of \d+ tokens, \d+ threads? \(\d.* cores?.*\), run folder ", server.log)


def test_metrics_count_requests_and_stage_seconds(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model="shipped", prompt=PROMPT, max_tokens=8, temperature=0)
    text = httpx2.get(f"{server.url}/metrics").text
    rows = re.findall(r"^(gapless:\S+?)(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    value = {name: float(number) for name, number in rows}
    assert value["gapless:generation_tokens_total"] >= 8
    assert value["gapless:time_to_first_token_seconds_count"] >= 1
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert value[f"gapless:{name}_seconds_count"] >= 1
    assert value["gapless:iteration_tokens_total_count"] >= 8
    assert value["gapless:iteration_tokens_total_sum"] >= 10
    assert value["gapless:stage_busy_seconds_total"] > 0
    assert 'gapless:stage_idle_seconds_total{cause="control",model_name="shipped",replica="0",stage="0"}' in text


def test_many_clients_at_once(server: Server) -> None:
    """Streams of 48 clients are each whole."""

    async def one(http: httpx2.AsyncClient, seed: int) -> int:
        body = {"prompt": PROMPT, "max_tokens": 10, "ignore_eos": True, "stream": True, "seed": seed}
        async with http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return len(lines) - 1

    async def all_of_them() -> list[int]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(limits=limits) as http:
            return await asyncio.gather(*(one(http, seed) for seed in range(48)))

    assert asyncio.run(all_of_them()) == [10] * 48


@pytest.mark.slow
def test_no_body_breaks_it(server: Server, client: openai.OpenAI) -> None:
    """Each of 300 malformed bodies is answered, none as an error of ours, and the next good request too."""
    expected = client.completions.create(model="shipped", prompt=PROMPT, max_tokens=3, temperature=0).choices[0].text
    with httpx2.Client(base_url=server.url) as http:
        for request in itertools.islice(malformed(0), 300):
            answer = http.post(request.target, content=request.content, headers=request.headers)
            assert 200 <= answer.status_code < 500, (request.kind, request.content[:500], answer.text)
    answer = client.completions.create(model="shipped", prompt=PROMPT, max_tokens=3, temperature=0)
    assert answer.choices[0].text == expected


def test_the_seconds_of_a_stage_are_wall_time(server: Server, client: openai.OpenAI) -> None:
    def counted() -> float:
        text = httpx2.get(f"{server.url}/metrics").text
        return sum(map(float, re.findall(r"^gapless:stage_(?:busy|idle)_seconds_total\S+ (\S+)$", text, re.MULTILINE)))

    client.completions.create(model="shipped", prompt=PROMPT, max_tokens=3)
    time.sleep(0.5)
    before, began = counted(), time.monotonic()
    for _ in range(5):
        client.completions.create(model="shipped", prompt=PROMPT, max_tokens=30)
        time.sleep(0.2)
    time.sleep(0.5)
    assert counted() - before == pytest.approx(time.monotonic() - began, rel=0.3)


CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}{{ '<a>' if add_generation_prompt }}"


def check_chats(client: openai.OpenAI, url: str) -> None:
    """Chats and responses, whole and as events."""
    chat: Any = [{"role": "user", "content": [{"type": "text", "text": "import"}]}]
    prompt = "<user> import\n<a>"
    headers = {"authorization": "Bearer right"}
    tokens = httpx2.post(f"{url}/tokenize", json={"messages": chat}, headers=headers).json()["tokens"]
    plain = client.completions.create(model="mine", prompt=tokens, max_tokens=9, temperature=0)
    whole = client.chat.completions.create(
        model="mine", messages=chat, max_tokens=9, temperature=0, logprobs=True, top_logprobs=2
    )
    assert whole.choices[0].message.content == plain.choices[0].text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(tokens)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert [len(each.top_logprobs) for each in content] == [2] * 9
    assert content[0].logprob == content[0].top_logprobs[0].logprob
    chunks = list(
        client.chat.completions.create(model="mine", messages=chat, max_completion_tokens=9, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain.choices[0].text
    assert len(chunks) == 10
    form: Any = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}
    of_schema = client.chat.completions.create(model="mine", messages=chat, seed=1, response_format=form)
    assert set(json.loads(of_schema.choices[0].message.content or "")) == {"name", "ok"}
    llama_cpp: Any = {"type": "json_object", "schema": SCHEMA}
    of_object = client.chat.completions.create(model="mine", messages=chat, seed=1, response_format=llama_cpp)
    assert of_object.choices[0].message.content == of_schema.choices[0].message.content
    text: Any = {"format": {"type": "json_schema", "name": "one", "schema": SCHEMA}}
    response = client.responses.create(model="mine", input="import", text=text)
    assert set(json.loads(response.output_text)) == {"name", "ok"}
    answer = client.responses.create(model="mine", input="import", max_output_tokens=9, temperature=0)
    assert answer.output_text == plain.choices[0].text
    assert answer.status == answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    events = list(
        client.responses.create(
            model="mine", instructions="", input="import", max_output_tokens=9, temperature=0, stream=True
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert events[-2].item.status == "incomplete"  # type: ignore[union-attr]
    assert prompt == httpx2.post(f"{url}/detokenize", json={"tokens": tokens}, headers=headers).json()["prompt"]


def test_a_prompt_that_came_before_is_taken_from_the_cache(client: openai.OpenAI, server: Server) -> None:
    prompt = f"# {random.random()}\n" + PROMPT * 20
    before = cache_counters(server.url)
    body: dict[str, Any] = {"model": "shipped", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    first, second = client.completions.create(**body), client.completions.create(**body)
    salted = client.completions.create(**body, extra_body={"cache_salt": "mine"})
    assert first.choices[0].text == second.choices[0].text == salted.choices[0].text
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, second, salted)]  # type: ignore[union-attr]
    length = first.usage.prompt_tokens  # type: ignore[union-attr]
    assert cached == [0, (length - 1) // 16 * 16, 0]
    *_, last = client.completions.create(**body, n=2, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cached_tokens == cached[1], "the prompt counts once"
    expected = [before[0] + 5 * length, before[1] + 3 * cached[1]]
    server.until(lambda: cache_counters(server.url) == expected)


def cache_counters(url: str) -> list[float]:
    """Prompt tokens that were looked for in the prefix cache, and those that were found."""
    text = httpx2.get(f"{url}/metrics").text
    names = ("queries", "hits")
    return [float(re.findall(rf"^gapless:prefix_cache_{name}_total\{{.*\}} (\S+)$", text, re.M)[0]) for name in names]


@pytest.mark.slow
def test_keys_chats_a_full_queue_and_a_drain(tmp_path: Path) -> None:
    """A second server: who has no key stays out, one request too many is turned away, SIGTERM lets the last finish."""
    (tmp_path / "keys").write_text("other\nright\n")
    shutil.copytree(SHIPPED, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(CHAT)
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1.0] * 16}
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["rope_parameters"] |= factors | {"original_max_position_embeddings": 1024}
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    overrides = (
        "model=./model",
        "serve.api_keys=[@keys]",
        "serve.max_waiting=3",
        "serve.model_name=mine",
        "serve.isolate_keys=true",
    )
    with serving(tmp_path, *overrides) as server:
        assert httpx2.get(f"{server.url}/v1/models").status_code == 401
        wrong = httpx2.get(f"{server.url}/v1/models", headers={"authorization": "Bearer wrong"})
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        assert httpx2.get(f"{server.url}/v1/models", headers={"x-api-key": "right"}).status_code == 200
        refused = httpx2.post(f"{server.url}/v1/messages", json={}, headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0)
        assert client.models.list().data[0].id == "mine"
        assert server.log.count("longrope: ") == 1
        assert server.log.count("model.dtype=auto") == (0 if multiplies_bfloat16() else 1)
        check_chats(client, server.url)
        assert [cached_tokens(server.url, key) for key in ("right", "other", "right")] == [0, 0, 16]
        with pytest.raises(openai.BadRequestError, match="n: 4 outputs"):  # which would be turned away for ever
            client.completions.create(model="mine", prompt=PROMPT, n=4)
        turned_away = [answer for answer in at_once(server.url, 8) if answer.status_code != 200]
        assert {answer.status_code for answer in turned_away} == {429}
        assert turned_away[0].headers["retry-after"] == "1"
        children = descendants_of(server.process.pid)
        stream = client.completions.create(
            model="mine", prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        brief = (client.completions.create(model="mine", prompt=PROMPT, max_tokens=1) for _ in itertools.count())
        with pytest.raises((openai.APIStatusError, openai.APIConnectionError)):
            list(brief)  # until it has noticed the signal
        assert len(list(stream)) == 199
        assert server.process.wait(HANGS_S) == 0
        assert_gone(children)


def at_once(url: str, count: int) -> list[httpx2.Response]:
    """Send requests of three outputs at the same time, and return the answers."""
    body = {"prompt": PROMPT * 50, "n": 3, "max_tokens": 1}

    async def send() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(base_url=url, headers={"authorization": "Bearer right"}) as http:
            return await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(count)))

    return asyncio.run(send())


def cached_tokens(url: str, key: str) -> int:
    """Tokens of a prompt that the server finds for the holder of a key."""
    body = {"prompt": list(range(1, 33)), "max_tokens": 1}
    answer = httpx2.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
def test_a_dead_engine_never_answers_200(tmp_path: Path) -> None:
    """Open requests get an error, health says so, the server ends with exit code 1, and no rank stays."""
    with serving(tmp_path, "parallel=pp2", "parallel.threads=1") as server:
        children = descendants_of(server.process.pid)
        body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            (engine,) = server.engines
            os.kill(engine, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert "error" in json.loads(rest[-2].removeprefix("data: "))
        assert server.process.wait(HANGS_S) == 1
        assert "the engine process died" in server.log
        assert len(children) > 3
        assert_gone(children)


@pytest.mark.slow
def test_two_stages_and_a_killed_front(tmp_path: Path) -> None:
    """Tokens over two stages are those of one; when the front is killed, the engine and its ranks end by themselves."""
    with serving(tmp_path, "parallel=pp2", "parallel.threads=1", "scheduler=equal_time") as server:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        over_two = httpx2.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"]
        children = descendants_of(server.process.pid)
        assert len(children) > 3
        busy = 'gapless:stage_busy_seconds_total{model_name="shipped",replica="0",stage="1"}'
        server.until(lambda: busy in httpx2.get(f"{server.url}/metrics").text)  # spans may come after the text
        server.process.kill()
        server.process.wait()
    assert_gone(children)
    with LLM("shipped") as llm:
        (expected,) = llm.generate([PROMPT], SamplingParams(max_tokens=12))
    assert over_two == expected.outputs[0].text


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "gapless.launch.cli", "serve", "model=shipped", f"serve.port={port}"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"serve.port={port}" in done.stderr
