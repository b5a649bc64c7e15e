"""Tests of the page of a run and of the terminal's tables, on runs of a small simulated pipeline."""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
import subprocess
import zlib
from collections import deque
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gapless.runtime.analysis.drawing.chart import Axis, Chart, Series
from gapless.runtime.analysis.drawing.page_parts import fill, script_json
from gapless.runtime.analysis.drawing.png import write_figures
from gapless.runtime.analysis.ledger.causes import BUBBLES, CAUSES, STARVED, Cause
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.ledger.summary import summarize
from gapless.runtime.analysis.report.idle_table import bubble_table
from gapless.runtime.analysis.report.metrics import metric_of
from gapless.runtime.analysis.report.run_page import render_report
from gapless.runtime.analysis.report.run_tables import latency_table
from gapless.runtime.core.messages import Span
from gapless.runtime.core.request_record import RequestRecord
from gapless.runtime.core.run_record import DecodesRecord, MicroBatchRecord, RunRecord, SegmentRecord, Wait
from tests.support.idle_intervals import bubble_share, idle_share
from tests.support.tiers import HANGS_S
from tests.support.written_runs import analysed, write_run


def simulated_run(num_stages: int, num_micro_batches: int, *, seed: int = 0) -> RunRecord:
    """Simulate a run of chunks with decodes; some micro-batches have only one of them.

    Requests arrive in bursts, the last stage is slower, and sends take time.
    """
    rng = random.Random(seed)
    record = RunRecord(num_stages, 400)
    free = [0.0] * num_stages
    clock, arrivals = 0.0, 0.0
    waiting: deque[RequestRecord] = deque()
    running: dict[int, int] = {}  # request -> tokens with KV
    busy: dict[int, int] = {}  # request -> micro-batch in flight
    completions: deque[tuple[int, float]] = deque()
    prompt_at, current = 0, None
    while len(record.micro_batches) < num_micro_batches:
        while arrivals <= clock or not (waiting or running or current):
            arrivals += rng.expovariate(2.0) if rng.random() < 0.97 else 6.0
            request = RequestRecord(len(record.requests), rng.randint(100, 1800), arrivals)
            record.requests.append(request)
            waiting.append(request)
        waits = []
        if len(completions) >= num_stages:
            micro_batch, end = completions.popleft()
            if end > clock:
                waits.append(Wait(clock, end, "depth_full"))
                clock = end
            for request_id in [r for r, s in busy.items() if s == micro_batch]:
                del busy[request_id]
        if current is None and waiting and waiting[0].arrival <= clock and len(running) < 24:
            current, prompt_at = waiting.popleft(), 0
            current.first_dispatched = clock
        ready = [r for r in running if r not in busy][: -(-max(1, len(running)) // num_stages)]
        if current is None and not ready:
            until = completions[0][1] if completions else max(clock, waiting[0].arrival)
            reason = "in_flight" if completions else "no_request"
            if until > clock:
                waits.append(Wait(clock, until, reason))  # type: ignore[arg-type]
                clock = until
            if completions:
                micro_batch, _ = completions.popleft()
                busy = {r: s for r, s in busy.items() if s != micro_batch}
                ready = [r for r in running if r not in busy]
            else:
                current, prompt_at = waiting.popleft(), 0
                current.first_dispatched = clock
        number = len(record.micro_batches)
        row = MicroBatchRecord(
            number, 0.0, [], DecodesRecord.at(), waits, num_waiting=len(waiting), num_running=len(running)
        )
        if current is not None:
            tokens = min(256 - len(ready), current.prompt_tokens - prompt_at)
            row.chunks = [SegmentRecord(current.request, prompt_at, tokens)]
        row.decodes = DecodesRecord.of(SegmentRecord(r, running[r], 1) for r in ready)
        row.kv_blocks_used = min(400, sum(running.values()) // 64 + prompt_at // 64)
        clock += rng.uniform(0.0005, 0.002)
        row.dispatched = there = clock
        cost = 0.012 + 2.2e-4 * row.num_tokens + 2e-6 * row.decode_context + (6e-6 * prompt_at if row.chunks else 0)
        for stage in range(num_stages):
            begin = max(there, free[stage])
            length = cost * rng.uniform(0.97, 1.05) * (1.15 if stage == num_stages - 1 else 1.0)
            record.spans.append(Span(number, stage, free[stage], there, begin, begin + length, begin + length + 1e-4))
            free[stage] = begin + length
            there = free[stage] + rng.uniform(0.001, 0.004)
        row.completed = free[-1]
        completions.append((number, free[-1]))
        for request_id in ready:
            running[request_id] += 1
            busy[request_id] = number
            request = record.requests[request_id]
            request.token_times.append(free[-1])
            if request.output_tokens >= 40 + request_id % 90:
                request.finished, request.finish_reason = free[-1], "length"
                del running[request_id], busy[request_id]
        if current is not None:
            prompt_at += row.prefill_tokens
            if prompt_at == current.prompt_tokens:
                current.token_times.append(free[-1])
                running[current.request], busy[current.request], current = prompt_at, number, None
        record.micro_batches.append(row)
    return record


CONFIG = {"model": {"name": "tiny", "layers": 8}, "scheduler": {"name": "sarathi", "note": "</script><b>{{title}}"}}


def page_of(record: RunRecord, title: str = "gapless generate: a <run> & more") -> str:
    run = analysed(record, CONFIG, versions={"gapless": "0.1.0"}, title=title)
    run.ledger.check()
    return render_report(run)


class Checker(HTMLParser):
    """Checks that tags close in order, and collects what the page refers to."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.text: dict[str, str] = {}
        self._id = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self._id = values.get("id") or ""
        self.references += [values[name] or "" for name in ("src", "href") if name in values]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open[-1:] == [tag]:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> does not close the innermost tag"
        self._id = ""

    def handle_data(self, data: str) -> None:
        if self._id:
            self.text[self._id] = self.text.get(self._id, "") + data


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_page_is_whole_and_needs_nothing_from_outside(num_stages: int):
    page = page_of(simulated_run(num_stages, 200))
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert [reference for reference in checker.references if not reference.startswith("#t=")] == []
    assert not re.search(r"https?:|//cdn|@import|url\(", page)
    assert "{{" not in page.replace("{{title}}", "", 1)  # the one that the config holds, as text
    assert "gapless generate: a &lt;run&gt; &amp; more" in page
    assert "&lt;/script&gt;&lt;b&gt;" in page
    assert "NaN" not in page.split('id="columns0"')[0]


def unpack(layout: dict[str, tuple[str, int, int]], text: str) -> dict[str, np.ndarray]:
    """Unpacks columns as the page's script does."""
    buffer = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    arrays = {}
    for name, (kind, offset, length) in layout.items():
        if kind == "u8":
            arrays[name] = buffer[offset : offset + length]
            continue
        planes = buffer[offset : offset + 4 * length].reshape(4, length).astype(np.uint32)
        values = planes[0] | planes[1] << 8 | planes[2] << 16 | planes[3] << 24
        arrays[name] = np.cumsum(values, dtype=np.uint32) if kind == "d32" else values
    return arrays


def test_the_page_holds_the_run():
    record = simulated_run(3, 150)
    ledger = Ledger(record)
    checker = Checker()
    checker.feed(page_of(record))
    head = json.loads(checker.text["head"])
    (run,) = head["runs"]
    arrays = unpack(run["arrays"], checker.text["columns0"])
    assert [cause["css"].replace("-", "_") for cause in head["causes"]] == [str(cause) for cause in CAUSES]
    for stage in range(3):
        busy = (arrays[f"end{stage}"].astype(float) - arrays[f"begin{stage}"]).sum() * head["tick"]
        assert busy == pytest.approx(ledger.busy_seconds(stage), rel=1e-6)
        idle = (arrays[f"idleEnd{stage}"].astype(float) - arrays[f"idleStart{stage}"]) * head["tick"]
        seconds = np.bincount(arrays[f"cause{stage}"], weights=idle, minlength=len(CAUSES))
        assert seconds == pytest.approx(list(ledger.seconds_by_cause(stage).values()), rel=1e-6, abs=1e-6)
    assert arrays["prefill"].tolist() == [micro_batch.prefill_tokens for micro_batch in record.micro_batches]
    assert arrays["decodes"].tolist() == [micro_batch.decode_tokens for micro_batch in record.micro_batches]
    assert (run["microBatches"], run["shown"]) == (150, 150)


@pytest.mark.parametrize("record", [RunRecord(2, 0), RunRecord(1, 8, requests=[RequestRecord(0, 4, 1.0)])])
def test_a_run_of_nothing_still_has_a_page(record: RunRecord):
    assert "nothing measured" in page_of(record)


def test_filling_does_not_look_at_what_it_filled_in():
    assert fill("{{a}}-{{b}}", {"a": "{{b}}", "b": "2"}) == "{{b}}-2"
    assert "</" not in script_json({"a": "</script>"})
    assert json.loads(script_json({"a": "</script>\u2028"})) == {"a": "</script>\u2028"}


def test_tables_for_the_terminal():
    record = simulated_run(2, 120)
    ledger = Ledger(record)
    fleet = Fleet([record], ledgers=[ledger])
    summary = summarize(fleet)
    console = Console(width=110, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(bubble_table(fleet))
    console.print(latency_table(summary))
    text = console.export_text()
    for word in ("stage 0", "stage 1", "transport", "idle", "bubbles", "TTFT", "TBT", "end to end", "p99"):
        assert word in text
    assert f"{idle_share(ledger) * 100:.1f}%" in text


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_it(tmp_path: Path):
    (tmp_path / "report.html").write_text(page_of(simulated_run(2, 3000)), encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --user-data-dir={tmp_path / 'profile'} --dump-dom"
    page = (tmp_path / "report.html").as_uri()
    done = subprocess.run(
        [str(CHROMIUM), *flags.split(), "--virtual-time-budget=5000", page],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    drawn = re.search(r'<body data-drawn="(\d+)"', done.stdout)
    assert drawn, done.stderr[-2000:]


def test_idle_and_bubbles_are_one_number_each():
    record = simulated_run(3, 200)
    ledger = Ledger(record)
    seconds, whole = ledger.seconds_by_cause(), ledger.stage_seconds
    bubbles = sum(seconds[cause] for cause in BUBBLES) / whole
    outer = sum(seconds[cause] for cause in (*STARVED, Cause.FILL_DRAIN)) / whole
    assert bubble_share(ledger) == pytest.approx(bubbles)
    assert idle_share(ledger) == pytest.approx(bubbles + outer)
    page = re.sub(r"<[^>]*>", " ", page_of(record).split("<main>")[1].split("<script")[0])
    assert {float(share) for share in re.findall(r"[Bb]ubbles\s+(\d+\.\d)%", page)} == {round(100 * bubbles, 1)}
    (row,) = re.findall(r"bubbles\s+Idle time without starved.*?(\d+\.\d)%", page, re.DOTALL)
    assert float(row) == round(100 * bubbles, 1)
    (total,) = re.findall(r"\bidle\s+With the compute time.*?(\d+\.\d)%", page, re.DOTALL)
    assert float(total) == round(100 * idle_share(ledger), 1)
    assert "docs/ledger.md#idle-and-bubbles" in page
    assert metric_of("bubble_fraction_inner").name == "bubbles"


def test_a_simulated_run_s_page_and_figures_say_so(tmp_path: Path):
    parallel = {"parallel": {"tp": 8, "pp": 2}, "hardware": {"name": "a100-80g"}, "simulation": {"replicas": 1}}
    summary = write_run(tmp_path, simulated_run(2, 60), CONFIG | parallel).summary
    title = "Simulated: sarathi, tiny on 16 x a100-80g, tp 8, pp 2"
    assert summary["title"] == title
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"<title>{title}</title>" in page
    assert f"<h1>{title}</h1>" in page
    assert "<th>stage-seconds</th>" in page
    chart = Chart("one", "Times", "lines", Axis("x"), Axis("y"), (Series("a", np.arange(2.0), np.arange(2.0), "s0"),))
    (file,) = write_figures(tmp_path, [chart], simulated=True)
    assert b"Times, simulated" in file.read_bytes()
