"""The live page, in a browser; its events, and who gets them; recordings of a running server."""

from __future__ import annotations

import asyncio
import html
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from msgspec import structs

from gapless.conf.build import to_mapping
from gapless.conf.schema import ServeConfig
from gapless.launch.compose import compose_one
from gapless.launch.server.endpoints.live import page_files
from gapless.launch.server.engine_client import EngineClient
from gapless.launch.server.monitor.last_minute import SECONDS, WINDOW, LastMinute
from gapless.launch.server.monitor.live import MAX_EVENTS, Live, Viewer
from gapless.launch.server.monitor.live_window import LiveWindow, said_of
from gapless.launch.server.prometheus import Metrics
from gapless.runtime.analysis.drawing.formatting import cause_label
from gapless.runtime.analysis.ledger.causes import CAUSES, Cause
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.live.recording import Recording, decoder, join_parts
from gapless.runtime.analysis.run_folder.read import read_run_folder
from gapless.runtime.engine.intake import Intake
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.serving.messages import LiveSpans, Snapshot, encoder
from tests.runtime.analysis.explain.test_replayed_causes import run_of
from tests.support.browser import CHROMIUM, CONTROL, DRIVER, ENTER, RIGHT, Browser, browsing
from tests.support.prefix_proxy import below_path
from tests.support.server import Server, serving
from tests.support.tiers import HANGS_S
from tests.support.written_runs import analysed

ROOT = Path(__file__).parents[2]
PROMPT = "import os\n"
KEY = {"authorization": "Bearer right"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    overrides = ("parallel=pp2", "parallel.threads=1", "serve.api_keys=[right]")
    with serving(tmp_path_factory.mktemp("live"), *overrides) as started:
        yield started


@contextmanager
def load(server: Server, streams: int = 2) -> Iterator[None]:
    """Streams one after the other, as long as the context lasts."""
    ended = threading.Event()
    body = {"prompt": PROMPT * 50, "max_tokens": 20, "ignore_eos": True, "stream": True}

    def ask() -> None:
        while not ended.is_set():
            httpx2.post(f"{server.url}/v1/completions", json=body, headers=KEY)

    threads = [threading.Thread(target=ask) for _ in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def events(server: Server, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Read the events of so many seconds, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    until = time.monotonic() + seconds
    with httpx2.stream("GET", f"{server.url}/live/events", headers=KEY) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.setdefault(name, []).append(json.loads(line[6:]))
            if time.monotonic() > until:
                break
    return found


def test_the_page_is_open_and_its_events_ask_for_the_key(server: Server) -> None:
    page = httpx2.get(server.url)
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    named = re.findall(r'(?:src|href)="(page/[^"]*)"', page.text)
    assert {name.removeprefix("page/") for name in named} | {"index.html"} == set(page_files())
    for name in named:
        assert httpx2.get(f"{server.url}/{name}").headers["content-security-policy"] == policy
    assert not re.search(r'(?:src|href)="http', page.text)
    assert httpx2.get(f"{server.url}/page/live.py").status_code == 404
    assert httpx2.get(f"{server.url}/live/events").status_code == 401


def test_events_tell_all_that_the_stages_did(server: Server) -> None:
    """Busy time and the causes of idle time follow each other on each stage without a hole or an overlap."""
    with load(server, streams=5):  # three of them share one of the two micro-batches in flight
        found = events(server, 4.0)
    hello = found["hello"][-1]
    assert (hello["stages"], hello["model"]) == (2, "shipped")
    assert [cause["css"].replace("-", "_") for cause in hello["causes"]] == [str(cause) for cause in CAUSES]
    spans = found["spans"]
    assert len(spans) > 5
    for stage in range(2):
        boxes: list[tuple[float, float]] = []
        for part in spans:
            assert part["left_out"] == 0
            for begin, end in (("begin", "end"), ("idle_start", "idle_end")):
                pairs = zip(part[begin][stage], part[end][stage], strict=True)
                boxes += [(part["origin"] + a / 1e5, part["origin"] + b / 1e5) for a, b in pairs]
        boxes.sort()
        holes = [after[0] - before[1] for before, after in pairwise(boxes)]
        assert max(map(abs, holes)) < 5e-5
    numbers = [part["first"] + n for part in spans for n in range(len(part["prefill"]))]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert max(max(part["prefill"], default=0) for part in spans) > 50
    assert max(max(part["decodes"], default=0) for part in spans) >= 2
    text = json.dumps(found)
    assert PROMPT not in text
    assert "import os" not in text
    row = found["second"][-1]["row"]
    assert row[1] > 0  # tokens/s
    assert 0 < row[7] <= row[8]  # TBT, p50 and p99
    assert found["second"][-1]["percentiles_ms"]["ttft"][0] > 0
    words = found["second"][-1]["words"]
    assert 1 <= len(words) <= 3
    assert all(sentence.endswith(".") for sentence in words)
    busy, *idle = map(sum, zip(*found["second"][-1]["stage_seconds"], strict=True))
    assert busy > 0
    assert sum(idle) > 0


def test_a_viewer_that_does_not_read_holds_up_nobody(server: Server) -> None:
    """One that reads gets its events, although another has an answer that it never takes."""
    host, port = server.url.removeprefix("http://").split(":")

    async def both() -> dict[str, list[dict[str, Any]]]:
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.write(b"GET /live/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer right\r\n\r\n")
        await writer.drain()
        try:
            return await asyncio.to_thread(events, server, 2.0)
        finally:
            writer.close()

    with load(server):
        found = asyncio.run(both())
    assert len(found["spans"]) > 3
    assert len(found["state"]) > 3


def test_a_slow_viewer_s_events_are_bounded_and_it_gets_all_anew(offline_client: EngineClient) -> None:
    live = Live("mine", offline_client)
    with live.viewer() as slow, live.viewer() as quick:
        for number in range(3 * MAX_EVENTS):
            offline_client.receive(encoder.encode(spans_at(number)))
            asyncio.run(quick.next())
        events = asyncio.run(slow.next())
        assert events.count(b"event: ") <= MAX_EVENTS
        assert events.startswith(b"event: hello")
        assert events.endswith(b"\n\n")
    viewer = Viewer(b"a")
    viewer.close()
    assert asyncio.run(viewer.next()) == b""


@pytest.fixture
def offline_client() -> EngineClient:
    """Return a client whose engine has not been started."""
    config = compose_one([], ServeConfig, "serve")
    return EngineClient(config, Intake(make_plan(config)).tokenizer, Metrics("mine", 100), lambda *said: None)


def spans_at(number: int) -> LiveSpans:
    return LiveSpans(float(number), number, 0, [1], [0], [[0]], [[9]], [[9]], [[10]], [[0]])


def test_the_last_minute_is_one() -> None:
    """Percentiles are within 1% of the true ones, numbers are of the window, and rows of a minute."""
    rng = np.random.default_rng(0)
    minute = LastMinute(100, 0.0)
    values = rng.lognormal(-4, 1, (2 * SECONDS, 200))
    for second in range(2 * SECONDS):
        minute.first_token(0.25)
        for value in values[second]:
            minute.next_token(float(value))
        minute.end_second(snapshot(second), second + 1.0)
    recent = values[-WINDOW:].ravel()
    found = minute.percentiles_ms
    assert found["tbt"] == pytest.approx([1e3 * float(np.percentile(recent, p)) for p in (50, 99)], rel=0.015)
    assert found["ttft"] == pytest.approx([250, 250], rel=0.01)
    assert minute.tokens_per_s == pytest.approx(201)
    assert len(minute.rows) == SECONDS
    assert minute.rows[-1] == minute.newest_row
    ((busy, *idle),) = minute.stage_seconds
    assert busy == pytest.approx(0.25 * WINDOW)
    assert sum(idle) == pytest.approx(0.75 * WINDOW)
    for second in range(2 * SECONDS, 4 * SECONDS):
        minute.end_second(snapshot(2 * SECONDS, is_idle=True), second + 1.0)
    assert minute.percentiles_ms["tbt"] == [None, None]
    ((busy, *idle),) = minute.stage_seconds
    assert (busy, idle[Cause.STARVED_NO_REQUEST.code]) == pytest.approx((0, WINDOW))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("scheduler=sarathi", "scheduler.chunk=128"),
        ("scheduler.max_batch=2",),
        ("parallel.layers=[26,14]",),
        ("workload.request_rate=0.5",),
    ],
)
def test_the_page_says_what_a_recording_of_the_same_seconds_says(overrides: tuple[str, ...]) -> None:
    run, config = run_of(*overrides)
    shown = to_mapping(config)
    middle = len(run.micro_batches) // 3
    began, now = run.micro_batches[middle].dispatched, run.spans[-1].end
    came = [replace(request) for request in run.requests if request.arrival >= began]
    there = [replace(request) for request in run.requests if request.arrival < began < (request.finished or 0.0)]
    looked, recording = Recording(run, 0, [], run.start), Recording(run, middle, there, began)
    for request in run.requests:
        looked.add(request)
    for request in came:
        recording.add(request)
    window = LiveWindow(now - began, run.start)
    for part in looked.take(run.micro_batches):
        window.take(decoder.decode(part))
    recording.stop(len(run.micro_batches), now)
    recorded = join_parts(iter([*recording.take(run.micro_batches), recording.last_part()]))
    recorded.window = (None, None)
    state = structs.replace(snapshot(1), busy=[0.0, 0.0])
    record = window.record_at(now, state)
    assert record is not None
    assert said_of(record, shown).words == analysed(recorded, shown).words != []


def test_the_page_says_nothing_too_early_and_that_no_request_is_there() -> None:
    window, state = LiveWindow(WINDOW, 100.0), snapshot(1, is_idle=True)
    assert window.record_at(100.5, state) is None
    record = window.record_at(105.0, state)
    assert record is not None
    config = compose_one([], ServeConfig, "serve")
    assert said_of(record, to_mapping(config)).words == ["There were no requests."]


def snapshot(second: int, is_idle: bool = False) -> Snapshot:
    """Return the state of an engine that computes a quarter of the time."""
    idle = [0.0] * len(CAUSES)
    idle[Cause.CONTROL.code] = 0.75 * second
    counted = {"busy": [0.25 * second], "idle": [idle], "ends": [float(second)]}
    return Snapshot(float(second), 3, 1, 50, False, 0, 0, 0, is_idle, **counted)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")
def test_a_browser_shows_the_pipeline_and_tries_the_model(server: Server, tmp_path: Path) -> None:
    with below_path(server.url, "/llm/") as url, browsing(tmp_path) as browser:
        browser.resize(1600, 1200)
        browser.open(url)
        browser.until("document.getElementById('alert').innerText.includes('asks for an API key')")
        assert browser.until("document.activeElement.id") == "key"
        browser.press("right" + ENTER)
        browser.until("document.getElementById('status').innerText === 'takes requests'")
        complaints = [entry["message"] for entry in browser.log]
        assert all("401" in message for message in complaints), complaints
        with load(server):
            browser.until("Number(document.querySelector('#picture canvas').dataset.boxes) > 100")
            browser.until("parseFloat(document.getElementById('rate').innerText) > 0")
            browser.until("parseFloat(document.getElementById('tbt99').innerText) > 0")
            browser.until("document.querySelectorAll('#causes tbody tr').length > 3")
            browser.until("document.getElementById('words').innerText.endsWith('.')")
            check_lanes(browser)
        check_prompt_box(browser, server)
        for width in (400, 1600):
            for scheme, ground in (("light", "rgb(246, 247, 249)"), ("dark", "rgb(18, 22, 27)")):
                browser.resize(width, 900)
                browser.prefer(scheme)
                browser.until(f"getComputedStyle(document.body).backgroundColor === '{ground}'")
                assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run(UNNAMED) == []
        assert browser.log == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver")
def test_the_page_and_a_recording_speak_of_the_same_seconds(server: Server, tmp_path: Path) -> None:
    """Also where long streams cross the edges of the recording."""
    long = {"prompt": PROMPT, "max_tokens": 900, "n": 2, "ignore_eos": True, "stream": True}
    with below_path(server.url, "/llm/") as url, browsing(tmp_path) as browser:
        browser.open(url)
        browser.until("document.activeElement.id === 'key'")
        browser.press("right" + ENTER)
        browser.until("document.getElementById('status').innerText === 'takes requests'")
        with (
            load(server, streams=1),
            httpx2.stream("POST", f"{server.url}/v1/completions", json=long, headers=KEY) as answer,
        ):
            next(answer.iter_lines())
            browser.run("document.getElementById('explain').click()")
            browser.until("document.getElementById('pause').getAttribute('aria-pressed') === 'true'")
            read = "return document.getElementById(arguments[0]).innerText"
            rate, idle = (float(browser.run(read, name)) for name in ("rate", "idle"))
            held = browser.run("return document.querySelector('main h2').innerText")
            assert held.startswith("The last 10 s before ")
            shares = dict(browser.run(SHARES))
        browser.until("document.getElementById('explained').innerText.includes(', recorded in ')")
        said = browser.run("return document.querySelector('#words b').innerText")
        report = browser.run("return document.querySelector('#explained a').href")
        assert report.startswith(f"{url}recordings/")
        assert httpx2.get(report).status_code == 200
        folder = browser.run("return document.getElementById('explained').innerText").partition(", recorded in ")[2][
            :-1
        ]
        assert float(browser.run("return document.getElementById('rate').innerText")) == rate, "it is held"
    kept = read_run_folder(Path(folder))
    summary = kept.summary
    assert said in html.unescape((Path(folder) / "report.html").read_text())
    assert summary["output_throughput"] == pytest.approx(rate, rel=0.2)
    assert 100 * summary["bubble_fraction"] == pytest.approx(idle, abs=8)
    whole = summary["duration"] * 2
    assert shares
    for name, share in shares.items():
        if name != "idle":
            (cause,) = [cause for cause in CAUSES if cause_label(cause) == name]
            assert 100 * summary["bubble_seconds"][cause] / whole == pytest.approx(share, abs=8), name


# Of each row of the page's table of idle time the cause and the percentage.
SHARES = """return [...document.querySelectorAll("#causes tbody tr")]
  .map(row => [row.querySelector("th").innerText.trim(), parseFloat(row.querySelector("td").innerText)])"""


def check_lanes(browser: Browser) -> None:
    """Check that the pointer names a box, the keyboard changes the seconds shown, and a pause holds the picture."""
    browser.run("document.querySelector('#zoom input').focus()")
    browser.press(RIGHT + RIGHT)
    browser.until("document.querySelector('#zoom :checked').value === '0.5'")
    browser.run("document.getElementById('pause').focus()")
    browser.press(" ")
    browser.until("document.getElementById('pause').getAttribute('aria-pressed') === 'true'")
    pixels = "return document.querySelector('#picture canvas').toDataURL()"
    time.sleep(0.3)
    before = browser.run(pixels)
    named: set[str] = set()
    for x in (first + step for first in range(100, 150, 5) for step in range(0, 1350, 50)):  # coarsely, then between
        browser.point_at("#picture canvas", x, 50)
        named.add(browser.run("return document.querySelector('.tip').innerText").split(" ")[0])
        if {"micro-batch", "idle:"} <= named:
            break
    assert {"micro-batch", "idle:"} <= named
    assert browser.run(pixels) == before
    browser.run("document.getElementById('pause').click()")
    deadline = time.monotonic() + HANGS_S
    while browser.run(pixels) == before:
        assert time.monotonic() < deadline


def check_prompt_box(browser: Browser, server: Server) -> None:
    """Check that the answer is that of any other client."""
    browser.run(
        "document.getElementById('temperature').value = 0; document.getElementById('max-tokens').value = 24;"
        "document.getElementById('prompt').value = arguments[0]; document.getElementById('prompt').focus()",
        PROMPT,
    )
    browser.press(CONTROL + ENTER)
    note = browser.until("/^24 tokens.*/.exec(document.getElementById('answer-note').innerText)")
    assert "first after" in note[0]
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    expected = httpx2.post(f"{server.url}/v1/completions", json=body, headers=KEY).json()["choices"][0]["text"]
    assert browser.run("return document.getElementById('answer').textContent") == PROMPT + expected


# What the keyboard reaches and has no name.
UNNAMED = """return [...document.querySelectorAll("button, input, textarea, canvas, [tabindex]")]
  .filter(one => !(one.labels?.length || one.innerText?.trim() && one.tagName === "BUTTON" ||
                   one.ariaLabel || one.getAttribute("aria-labelledby")))
  .map(one => one.outerHTML)"""


def record(server: Server, seconds: str = "1", headers: dict[str, str] = KEY) -> httpx2.Response:
    return httpx2.post(f"{server.url}/record?seconds={seconds}", headers=headers)


@pytest.mark.slow
def test_a_recording_is_a_run_folder(server: Server) -> None:
    """Its ledger conserves time, its requests are those that came and ended in it, and it holds no key."""
    crosses = {"prompt": PROMPT, "max_tokens": 900, "n": 8, "ignore_eos": True, "stream": True}
    with (
        load(server),
        ThreadPoolExecutor(2) as pool,
        httpx2.stream("POST", f"{server.url}/v1/completions", json=crosses, headers=KEY) as long,
    ):
        lines = long.iter_lines()  # the stream is closed where nobody holds it
        next(lines)
        asked = time.monotonic()
        both = [pool.submit(record, server, "2") for _ in range(2)]
        answer, refused = sorted((one.result() for one in both), key=lambda one: one.status_code)
        answered = time.monotonic()
    assert answer.status_code == 200, answer.text
    assert (refused.status_code, "in progress" in refused.text) == (409, True)
    found = answer.json()
    folder = Path(found["folder"])
    assert re.fullmatch(r"recording_\d+", folder.name)
    names = {"summary.json", "report.html", "trace.json.gz", "requests.csv", "spans.csv.gz", "record.jsonl.gz"}
    assert names <= set(found["files"])
    assert set(found["files"]) == {file.name for file in folder.iterdir()}
    assert "right" not in (folder / "summary.json").read_text()
    assert found["words"][0] in html.unescape((folder / "report.html").read_text())
    kept = read_run_folder(folder)
    run = kept.load()
    ledger = Ledger(run)
    ledger.check()
    assert run.num_stages == 2
    assert 1.5 < ledger.span_seconds < answered - asked
    assert ledger.busy_seconds() > 0.2
    assert len(run.spans) == 2 * len(run.micro_batches) == 2 * found["micro_batches"]
    assert run.requests
    assert found["completed"] == len(run.requests) + sum(request.finish_reason != "goes_on" for request in run.crossing)
    assert all(request.output_tokens == 20 and request.arrival >= -1e-6 for request in run.requests)
    tokens = sum(request.output_tokens for request in (*run.requests, *run.crossing))
    assert kept.summary["output_throughput"] == pytest.approx(tokens / kept.summary["duration"])
    assert tokens > 20 * len(run.requests) + 8
    (crossing,) = re.findall(r"(\d+) requests started before it or continued after it", run.notes[-1])
    assert 8 <= int(crossing) <= 8 + 4  # the long ones, and of two streams at both ends
    assert "stage 1" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_recording_counts_from_when_the_engine_begins(server: Server) -> None:
    server.until_ready()
    (engine,) = server.engines
    os.kill(engine, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(record, server, "0.3")
            time.sleep(0.6)
            os.kill(engine, signal.SIGCONT)
            assert found.result().json()["duration"] >= 0.3
    finally:
        os.kill(engine, signal.SIGCONT)


@pytest.mark.slow
def test_a_recording_of_an_idle_server_and_wrong_ones(server: Server, tmp_path: Path) -> None:
    idle = record(server, "0.2")
    assert idle.status_code == 200, idle.text
    found = idle.json()
    assert (found["micro_batches"], found["bubble_fraction"], found["words"]) == (0, 1.0, ["There were no requests."])
    assert found["duration"] >= 0.2
    for seconds in ("0", "x", "nan", "1e9"):
        wrong = record(server, seconds)
        assert wrong.status_code == 400
        assert "0.1 to 600" in wrong.json()["error"]["message"]
    for path in (
        "/record?seconds=1&second=2",
        "/record?Seconds=1",
        "/live/events?replicas=1",
        "/live/events?seconds=1",
    ):
        unknown = httpx2.request("POST" if "record" in path else "GET", server.url + path, headers=KEY)
        assert unknown.status_code == 400
        assert re.search("not a query parameter of /.*; must be .*replica$", unknown.json()["error"]["message"])
    assert httpx2.get(f"{server.url}/v1/models?beta=true", headers=KEY).status_code == 200
    assert record(server, headers={}).status_code == 401
    assert record(server, headers={**KEY, "sec-fetch-site": "cross-site"}).status_code == 403
    other = Server(tmp_path, "serve.host=0.0.0.0")
    try:
        refused = record(other, headers={})
        assert (refused.status_code, "serve.api_keys" in refused.text) == (403, True)
    finally:
        other.process.kill()
        other.process.wait()


def test_the_dashboard_asks_for_metrics_that_there_are(server: Server) -> None:
    """Each metric of docs/grafana, and each label by which it is chosen or summed, is one of a running server's."""
    httpx2.post(f"{server.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}, headers=KEY)
    time.sleep(0.5)
    labels: dict[str, set[str]] = {}
    text = httpx2.get(f"{server.url}/metrics").text
    for name, found in re.findall(r"^(gapless:\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
        labels.setdefault(name, {"instance"}).update(re.findall(r'(\w+)="', found))
    board = json.loads((ROOT / "docs/grafana/gapless.json").read_text())
    queries = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    variables = [one for one in board["templating"]["list"] if one["type"] == "query"]
    for title, query in [*queries, *((one["name"], one["definition"]) for one in variables)]:
        names = re.findall(r"gapless:\w+", query)
        assert names, title
        assert set(names) <= labels.keys(), title
        for name, chosen in re.findall(r"(gapless:\w+)\{(.*?)\}", query):
            assert set(re.findall(r"(\w+)!?=", chosen)) <= labels[name], (title, name)
        summed = [label for found in re.findall(r" by \((.*?)\)", query) for label in found.split(", ")]
        summed += re.findall(r"label_values\(.*, (\w+)\)", query)
        assert set(summed) <= set.union(*(labels[name] for name in names)), title
        assert query.count("(") == query.count(")")
    idle = {name for name in labels if name.startswith("gapless:stage_")}
    assert idle <= {name for _, query in queries for name in re.findall(r"gapless:\w+", query)}
    colours = {one["matcher"]["options"] for one in board["panels"][0]["fieldConfig"]["overrides"]}
    assert colours == {"busy", *map(str, CAUSES)}
