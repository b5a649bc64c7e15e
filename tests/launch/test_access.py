"""What an operator sees of a server: its log, its counters, its traces, TLS, limits, and recordings at a URL."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai.types.responses import ResponseFailedEvent
from prometheus_client.parser import text_string_to_metric_families

import gapless.models
from gapless.launch.cli import main
from gapless.launch.server.access import Access
from gapless.launch.server.exchange import Exchange
from gapless.launch.server.keys import Keys
from gapless.launch.server.prometheus import Metrics
from gapless.launch.server.rate_limit import RateLimits
from gapless.launch.server.routes import ROUTES
from gapless.launch.stderr_log import one_word
from tests.support.server import DEAD_PROXIES, Server, serving
from tests.support.tiers import HANGS_S

ALICE = {"authorization": "Bearer sk-alice"}
BODY = {"prompt": "def ", "max_tokens": 4}
TINY = ("model=shipped", "parallel.threads=1")


class Collector:
    """Takes OpenTelemetry's spans over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [s for r in requests for of in r.resource_spans for scope in of.scope_spans for s in scope.spans]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk")
    found = Collector()
    yield found
    found.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("access")
    (folder / "keys").write_text("sk-alice alice\nsk-bob\nsk-dave dave\nsk-erin erin\nsk-frank\n")
    keys = f"serve.api_keys=[@{folder / 'keys'}]"
    limits = ("serve.requests_per_minute=5", "serve.tokens_per_minute=300")
    options = ("serve.log_format=json", f"serve.otlp_endpoint={collector.url}")
    with serving(folder, *TINY, keys, *limits, *options, env=DEAD_PROXIES) as started:
        yield started


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.splitlines(keepends=True) if line.endswith("\n")]


def line_of(server: Server, request_id: str) -> dict[str, Any]:
    """Return the line of a request; it is written once the answer has gone out."""
    server.until(lambda: any(line.get("request_id") == request_id for line in lines(server)))
    (line,) = [line for line in lines(server) if line.get("request_id") == request_id]
    return line


def test_the_log_says_what_starts(server: Server) -> None:
    first = lines(server)[0]
    assert re.fullmatch(
        r"version \S+: model shipped, policy equal_time, pp=1 x tp=1, KV cache of \d+ tokens, "
        r"\d+ threads? \(.+, \S+\), run folder /\S+",
        first["message"],
    )
    assert first["level"] == "info"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])


def test_each_request_has_a_line_with_its_id_tokens_and_times(server: Server) -> None:
    headers = ALICE | {"x-request-id": "mine"}
    answer = httpx2.post(f"{server.url}/v1/completions", json=BODY, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    line = line_of(server, "mine")
    assert (line["message"], line["key"]) == ("POST /v1/completions 200", "alice")
    assert (line["prompt_tokens"], line["output_tokens"]) == (2, 4)
    assert 0 < line["ttft_ms"] <= line["duration_ms"]
    assert "def " not in server.log
    assert "sk-alice" not in server.log


@pytest.mark.parametrize(
    ("id", "headers", "path", "status", "level"),
    [
        ("no-key", {}, "/v1/models", 401, "warning"),
        ("wrong-key", {"authorization": "Bearer sk-carol"}, "/v1/models", 401, "warning"),
        ("no-path", ALICE, "/v1/nothing", 404, "info"),
    ],
)
def test_refusals_are_logged(server: Server, id: str, headers: dict[str, str], path: str, status: int, level: str):
    answer = httpx2.get(server.url + path, headers=headers | {"x-request-id": id})
    line = line_of(server, id)
    assert (answer.status_code, line["message"], line["level"]) == (status, f"GET {path} {status}", level)
    assert ("error" in line) == (level == "warning")
    assert "sk-carol" not in server.log


def test_a_key_has_so_many_requests_a_minute(server: Server) -> None:
    headers = {"authorization": "Bearer sk-bob"}
    answers = [httpx2.post(f"{server.url}/v1/completions", json=BODY, headers=headers) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert int(answers[5].headers["retry-after"]) >= 1
    line = line_of(server, answers[5].headers["x-request-id"])
    assert (line["level"], line["key"], line["message"]) == ("warning", "key 1", "POST /v1/completions 429")
    assert "serve.requests_per_minute=5 is exhausted" in line["error"]


def test_the_line_of_a_400_names_the_field_and_quotes_nothing(server: Server) -> None:
    headers = {"authorization": "Bearer sk-frank", "x-request-id": "wrong"}
    body = BODY | {"prompt": "my secret", "temperature": "hot"}
    assert httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 400
    line = line_of(server, "wrong")
    assert (line["level"], line["field"], line.get("error")) == ("info", "temperature", None)
    assert "secret" not in str(line)


def test_a_key_pays_for_the_tokens_that_it_gets(server: Server) -> None:
    """Of 300 tokens a minute 700 are taken, most of them by the output: the next request has to wait."""
    headers = {"authorization": "Bearer sk-erin", "x-request-id": "long"}
    body = BODY | {"max_tokens": 700, "ignore_eos": True}
    assert httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
    assert line_of(server, "long")["output_tokens"] == 700
    refused = httpx2.post(f"{server.url}/v1/completions", json=BODY, headers=headers)
    assert refused.status_code == 429
    assert "serve.tokens_per_minute=300 is exhausted" in refused.text
    assert 1 <= int(refused.headers["retry-after"]) <= 81


def test_a_client_that_leaves_is_status_499(server: Server) -> None:
    body = BODY | {"max_tokens": 2000, "stream": True, "ignore_eos": True}
    headers = {"authorization": "Bearer sk-frank", "x-request-id": "leaves"}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as answer:
        next(answer.iter_lines())
    assert line_of(server, "leaves")["message"] == "POST /v1/completions 499"


def counters(server: Server) -> dict[tuple[str, ...], float]:
    """Return the requests by path and status, and the output tokens by key."""
    text = httpx2.get(f"{server.url}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels.get("model_name") for sample in samples} == {"shipped"}
    labels = {"gapless:http_requests_total": ("path", "status"), "gapless:key_generation_tokens_total": ("key",)}
    return {
        tuple(sample.labels[name] for name in labels[sample.name]): sample.value
        for sample in samples
        if sample.name in labels
    }


def test_counters_of_paths_and_keys_and_the_model_on_each_series(server: Server) -> None:
    before, headers = counters(server), {"authorization": "Bearer sk-dave"}
    for _ in range(6):
        httpx2.post(f"{server.url}/v1/completions", json=BODY, headers=headers)
    httpx2.get(f"{server.url}/v1/models")
    httpx2.get(f"{server.url}/v1/nothing", headers=ALICE)
    after = counters(server)
    added = {key: after[key] - before.get(key, 0.0) for key in after}
    wanted = {("/v1/completions", "200"): 5, ("/v1/completions", "429"): 1, ("/v1/models", "401"): 1, ("dave",): 20}
    assert {key: added[key] for key in (*wanted, ("other", "404"))} == wanted | {("other", "404"): 1}


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"BREW /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 501),
        (b"BREW /v1/models HTTP/1.1\r\n", 501),
        (b"PROPFIND /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"DELETE /health HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"not http at all\r\n\r\n", 400),
        (b"BR\x00EW / HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_methods_that_it_does_not_know(server: Server, head: bytes, status: int) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANGS_S) as connection:
        connection.sendall(head)
        assert connection.recv(1 << 16).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_recording_opens_at_a_url_that_only_its_asker_knows(server: Server) -> None:
    found = httpx2.post(f"{server.url}/record?seconds=0.2", headers=ALICE).json()
    page = httpx2.get(f"{server.url}/{found['url']}")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("sandbox ")
    assert page.text == (Path(found["folder"]) / "report.html").read_text(encoding="utf-8")
    beside = found["url"].removesuffix("report.html")
    assert httpx2.get(f"{server.url}/{beside}summary.json").status_code == 200
    for wrong in ("recordings/x/report.html", f"{beside}..%2F..%2Flog", f"{beside}nothing"):
        assert httpx2.get(f"{server.url}/{wrong}").status_code == 404


def test_traces_have_the_names_of_the_conventions(server: Server, collector: Collector) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = ALICE | {"x-request-id": "traced", "traceparent": parent}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    httpx2.post(f"{server.url}/v1/completions", json=BODY | {"temperature": 0}, headers=headers)
    httpx2.post(f"{server.url}/v1/chat/completions", json=body, headers=ALICE)  # the model has no template: 400
    assert server.stop() == 0  # sends what waits
    spans = {}
    for span in collector.spans():
        found = {each.key: each.value for each in span.attributes}
        spans[found["gapless.request_id"].string_value] = (span, found)
    span, found = spans["traced"]
    assert span.name == "text_completion shipped"
    assert span.trace_id.hex() == parent.split("-")[1]
    assert span.parent_span_id.hex() == parent.split("-")[2]
    assert found["gen_ai.operation.name"].string_value == "text_completion"
    assert found["gen_ai.usage.input_tokens"].int_value == 2
    assert found["gen_ai.usage.output_tokens"].int_value == 4
    assert [v.string_value for v in found["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
    assert found["gen_ai.response.time_to_first_chunk"].double_value > 0
    assert span.end_time_unix_nano > span.start_time_unix_nano
    assert [event.name for event in span.events] == ["first token"]


@pytest.mark.slow
def test_an_error_within_a_stream_counts_as_one(tmp_path: Path) -> None:
    shutil.copytree(Path(gapless.models.__path__[0]) / "shipped", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    own = ("model=./model", "serve.model_name=shipped", "serve.timeout_s=0.2", "serve.log_format=json")
    with serving(tmp_path, *TINY, *own) as server:
        body = BODY | {"max_tokens": 2000, "stream": True, "ignore_eos": True}
        headers = {"x-request-id": "late"}
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers)
        assert (answer.status_code, "within serve.timeout_s=0.2" in answer.text) == (200, True)
        asked = {"input": "import os", "max_output_tokens": 1900, "stream": True, "ignore_eos": True}
        failed = httpx2.post(f"{server.url}/v1/responses", json=asked).text.strip().split("\n\n")
        event, data = failed[-2].split("\n")
        assert (event, failed[-1]) == ("event: response.failed", "data: [DONE]")
        end = ResponseFailedEvent.model_validate_json(data.removeprefix("data: "), strict=True)
        assert (end.response.status, end.sequence_number) == ("failed", len(failed) - 2)
        assert end.response.error is not None
        assert (end.response.error.code, "serve.timeout_s=0.2" in end.response.error.message) == ("server_error", True)
        line = line_of(server, "late")
        assert (line["level"], line["message"]) == ("error", "POST /v1/completions 504")
        assert line["error"] == "the answer was not complete within serve.timeout_s=0.2"
        counted = (
            'gapless:http_requests_total{method="POST",model_name="shipped",path="/v1/completions",status="504"} 1.0'
        )
        assert counted in httpx2.get(f"{server.url}/metrics").text


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key -out cert"
    command += " -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    cert, key = tmp_path / "cert", tmp_path / "key"
    server = Server(tmp_path, *TINY, f"serve.ssl_certfile={cert}", f"serve.ssl_keyfile={key}", "serve.host=0.0.0.0")
    try:
        port = server.url.rpartition(":")[2]
        trust = ssl.create_default_context(cafile=str(cert))
        found = httpx2.get(f"https://127.0.0.1:{port}/version", verify=trust)
        assert found.status_code == 200
        large = b"x" * (33 << 20)
        assert httpx2.post(f"https://127.0.0.1:{port}/tokenize", content=large, verify=trust).status_code == 413
        assert f"https://0.0.0.0:{port}" in server.log
        assert "warning: serve.host=0.0.0.0: other machines can reach this server" in server.log
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["serve.ssl_keyfile=x"], "serve.ssl_certfile=None: must be a file if ssl_keyfile or ssl_ca_certs is set"),
        (["serve.ssl_certfile=none"], "serve.ssl_certfile=none: no such file or directory"),
        (
            ["serve.ssl_certfile=empty"],
            "serve.ssl_certfile=empty: not a certificate with its private key; set serve.ssl_keyfile",
        ),
        (
            ["serve.ssl_certfile=empty", "serve.ssl_keyfile=empty"],
            "serve.ssl_certfile=empty serve.ssl_keyfile=empty: not a certificate with its private key",
        ),
        (["serve.otlp_endpoint=here"], "serve.otlp_endpoint='here': must be null or http://HOST:PORT/v1/traces"),
        (["serve.requests_per_minute=0"], "serve.requests_per_minute=0: must be null or 1 or more"),
    ],
)
def test_wrong_keys_are_one_line(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    assert main(["serve", "model=shipped", "serve.port=0", *words]) == 2
    assert capfd.readouterr().err == f"gapless: error: {line}\n"


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        *(("/v1/models", status, "INFO") for status in (200, 400, 404, 499, 501)),
        *(("/v1/models", status, "WARNING") for status in (401, 403, 429)),
        *(("/v1/models", status, "ERROR") for status in (500, 502, 503, 504)),
        *(("/health", status, "DEBUG") for status in (200, 503)),
    ],
)
def test_the_level_of_a_line_says_who_has_to_act(
    path: str, status: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Operators are woken by errors: those that are the server's own, and no client's."""
    access = Access(Keys(()), Metrics("model", 1), RateLimits(), None)
    route = next(each for each in ROUTES if each.path == path)
    with caplog.at_level(logging.DEBUG):
        access.note(Exchange("GET", path, "id", route=route, status=status))
    (record,) = caplog.records
    assert (record.levelname, record.message) == (level, f"GET {path} {status}")


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_key_s_file_may_name_it(mark: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(mark + "\n one  alice \ntwo\n")
    keys = Keys(["zero", f"@{tmp_path / 'keys'}"])
    holders = [keys.holder(f"Bearer {key}") for key in ("zero", "one", "two")]
    assert holders == ["key 0", "key 1", "key 2"]
    assert [keys.shown(holder or "") for holder in holders] == ["key 0", "alice", "key 2"]
    assert keys.holder("Bearer one  alice") is None
    assert keys.holder("bearer one") == "key 1"
    assert keys.holder("Basic one") is None


def test_an_answer_of_a_key_that_is_gone_is_nobody_s() -> None:
    """A journal knows its owners by marks; one whose key was removed must not become one that everybody has."""
    before, after = Keys(["first", "second"]), Keys(["second", "third"])
    marks = [before.mark(holder) for holder in ("key 0", "key 1", "")]
    assert after.marked(marks[1]) == "key 0"
    assert after.marked(marks[0]) not in ("", "key 0", "key 1")
    assert (marks[2], after.marked("")) == ("", "")
    assert not {"first", "second"} & set(marks)


@pytest.mark.parametrize(
    ("value", "shown"), [("/v1", "/v1"), ("a b", "'a b'"), ('x" status=200', "'x\" status=200'"), ("é\n", "'é\\n'")]
)
def test_no_client_writes_fields_or_lines_of_its_own(value: str, shown: str) -> None:
    assert one_word(value) == shown
