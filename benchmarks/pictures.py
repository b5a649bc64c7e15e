"""Generates every picture of README.md and docs/, including the runs that some of them show: `make pictures`.

    python -m benchmarks.pictures [SCENE,...] [--draw]

Scenes:

- `pb1`, `pb2`, `pb3`: the bubbles of `docs/bubbles.md`, two minutes each. A `gapless bench` of a few requests over two
  stages runs first under a policy with that bubble, then under policies that remove it. The picture shows the window of
  the first run with the most of that bubble, and the middle of the others.
- `reading`: parts of a run's page and its charts for `docs/reading_a_report.md`. They show what a report looks like; no
  page quotes numbers from them.
- `first`: the report of `make run`, for `README.md`.
- `live`: the live page of a server with the same questions during a chat, for `docs/serve.md`.
- `performance`, `policies`: charts of numbers in `benchmarks/results` (`operators` and `every_policy`).
- `paper`: `docs/paper.md` and its charts, as `make paper`.
- `all`: a table of every policy for `docs/bubbles.md` instead of a picture, eight minutes. Runs only if named.

`reading`, `first` and `live` need Chromium and its driver, the last two also SmolLM2. `--draw` only draws.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np

from gapless import read_run
from gapless.conf.policies import POLICY_CONFIGS
from gapless.runtime.analysis.drawing.timeline_png import TimelineWindow, write_timeline
from gapless.runtime.analysis.ledger.causes import CAUSES, Cause
from gapless.runtime.analysis.ledger.ledger import Ledger
from gapless.runtime.analysis.run_folder.read import read_run_folder

from . import operators
from .paper.__main__ import main as paper
from .support.harness import Benchmark, Row, figures, run_gapless, say, scratch, words
from .support.real_pipeline import MACHINE
from .support.winners import draw_winners

IMAGES, QUESTIONS = Path("docs/images"), Path("conf/questions_prompts.jsonl")
NAMED = {"pb1": Cause.PB1_PREFILL_SIZE, "pb2": Cause.PB2_PREFILL_DECODE, "pb3": Cause.PB3_DECODE_CONTEXT}


@dataclass(frozen=True, slots=True)
class Scene:
    """Overrides of a `gapless bench`. The picture shows `seconds` of each run."""

    overrides: str
    seconds: float = 0.0
    all_at_worst: bool = False  # show the window with most of the bubble in every run, not only in the first


SCENES = {
    "pb1": Scene(
        "cache.num_blocks=2048 scheduler=prefill_first,sarathi,equal_time scheduler.max_prefill_tokens=1 "
        "scheduler.chunk=256 scheduler.batch=8 workload=fixed workload.input_len=700 workload.range_ratio=0.9 "
        "workload.output_len=4 workload.num_prompts=16",
        6.0,
    ),
    "pb2": Scene(
        "cache.num_blocks=2048 scheduler=orca_best,sarathi,equal_time scheduler.chunk=96 scheduler.batch=8 "
        "workload=fixed workload.input_len=500 workload.output_len=50 workload.range_ratio=0.6 workload.num_prompts=28",
        4.0,
    ),
    "pb3": Scene(
        "cache.num_blocks=2048 scheduler=request_level,equal_time scheduler.order=shortest_prompt scheduler.chunk=256 "
        "scheduler.batch=6 workload=fixed workload.input_len=900 workload.range_ratio=0.95 workload.output_len=40 "
        "workload.num_prompts=12 parallel.layers=[7,5]",
        1.5,
        all_at_worst=True,
    ),
    "all": Scene(
        "cache.num_blocks=2048 "
        "scheduler=request_level,orca_worst,orca_best,prefill_first,token_throttle,token_budget,sarathi,equal_time "
        "scheduler.batch=4 scheduler.chunk=64 scheduler.max_batched_tokens=64 scheduler.max_prefill_tokens=1024 "
        "workload=zipf workload.theta=0 workload.min_len=512 workload.max_len=1024 workload.num_prompts=14",
    ),
    "reading": Scene(
        "cache.num_blocks=320 scheduler=sarathi,equal_time scheduler.chunk=96 scheduler.batch=4 workload=fixed "
        "workload.input_len=400 workload.range_ratio=0.8 workload.output_len=40 workload.num_prompts=24 "
        "workload.request_rate=2"
    ),
}
FIRST = "model=smollm2 prompts=questions sampling.temperature=0.2 parallel=pp2 sampling.top_p=0.9"  # as `make run`
TALK = ("What is the capital of France?", "And what is it known for?")
SECTIONS = {"cards": ".cards", "timeline": "#pipeline", "idle": "section:has(table.bubbles)"}  # of a run's page
CHARTS = {  # of the page, by run
    "01_sarathi": "stage_times batch_composition kv_use queue bubble_time_per_request requests_completed ttft itl",
    "02_equal_time": "predictions",
}
RESULTS = Path("benchmarks/results")
MADE = {  # pictures in docs/images by scene; `paper` makes `paper_*`
    **{name: [name] for name in (*NAMED, "live", "performance", "policies")},
    "first": ["report"],
    "reading": [f"reading_{name}" for name in [*SECTIONS, *" ".join(CHARTS.values()).split()]],
    "paper": [],
}
COLOURS = 128
WIDTH = 1100  # CSS pixels of the page


def main() -> int:
    every = [*MADE, "all"]
    bench = Benchmark(__doc__, {"scenes": {"nargs": "?", "default": ",".join(MADE)}}, draw=False)
    for name in bench.given.scenes.split(","):
        if name not in every:
            bench.parser.error(f"no scene {name}: choose from {', '.join(every)}")
        folder = Path("runs/pictures") / name
        if name in DRAWN:
            DRAWN[name]()
            continue
        if name == "paper":
            if paper(["--write"] if bench.given.draw else []):
                return 1
            continue
        if name == "first":
            if not bench.given.draw:
                run_gapless("generate", *words(FIRST, f"hydra.run.dir={folder}"))
            draw_first(folder)
            continue
        scene = SCENES[name]
        if not bench.given.draw:
            run_gapless("bench", *words(MACHINE, scene.overrides, f"hydra.run.dir={folder}"))
        if name == "all":
            idle_by_policy(bench, folder)
        elif name == "reading":
            draw_report(folder)
        else:
            draw_bubble(folder, scene, NAMED[name], IMAGES / f"{name}.png")
    return bench.end()


def idle_by_policy(bench: Benchmark, folder: Path) -> None:
    """Report each run's idle time by cause as a share of stage time, its throughput and p99 TBT."""
    for run in json.loads((folder / "bench.json").read_text())["runs"]:
        stage_seconds = sum(run["bubble_seconds"].values()) / run["bubble_fraction"]
        shares = {f"{name}_share": run["bubble_seconds"][cause] / stage_seconds for name, cause in NAMED.items()}
        shares["other_idle_share"] = run["bubble_fraction"] - sum(shares.values())
        bench.row("policies", policy=run["policy"], **shares, **figures(run, "tokens_per_s", "p99_tbt_ms"))


def draw_bubble(folder: Path, scene: Scene, cause: Cause, image: Path) -> None:
    runs = {}
    for path in sorted(p for p in folder.iterdir() if (p / "summary.json").is_file()):
        ledger = Ledger(read_run_folder(path).load())
        at_worst = scene.all_at_worst or not runs
        window = densest(ledger, cause, scene.seconds) if at_worst else central(ledger, scene.seconds)
        runs[path.name[3:]] = TimelineWindow.of(ledger, window)
    say(str(write_timeline(image, runs)))


def densest(ledger: Ledger, cause: Cause, seconds: float) -> tuple[float, float]:
    """Return the window of `seconds` with the most idle time of a cause."""
    starts, lengths = (
        np.concatenate([getattr(idle, of)[idle.cause == CAUSES.index(cause)] for idle in ledger.idle_columns])
        for of in ("start", "seconds")
    )
    if not len(starts):
        return central(ledger, seconds)
    starts = starts - ledger.t0
    held = [float(lengths[(starts >= at) & (starts < at + seconds)].sum()) for at in starts]
    last = max(0.0, ledger.span_seconds - seconds)
    start = min(last, max(0.0, float(starts[int(np.argmax(held))]) - 0.05 * seconds))
    return start, start + seconds


def central(ledger: Ledger, seconds: float) -> tuple[float, float]:
    """Return the window of `seconds` in the middle of a run."""
    start = max(0.0, (ledger.span_seconds - seconds) / 2)
    return start, start + seconds


def draw_first(folder: Path) -> None:
    from tests.support.browser import browsing

    with scratch() as downloads, browsing(downloads) as browser:
        browser.prefer("light")
        browser.resize(1240, 900)
        browser.open((folder / "report.html").resolve().as_uri())
        browser.until("document.querySelector('canvas') !== null")
        browser.picture(IMAGES / "report.png", height=1180)
    in_few_colours(IMAGES / "report.png")


def draw_live() -> None:
    """Send the questions two at a time, chat in the page, and take a screenshot while an answer streams."""
    from tests.support.browser import browsing
    from tests.support.server import serving

    questions = (json.loads(row)["messages"] for row in QUESTIONS.read_text(encoding="utf-8").splitlines())
    with scratch() as folder, serving(folder, "model=smollm2", "parallel=pp2") as server, browsing(folder) as browser:
        browser.prefer("light")
        browser.resize(1600, 1200)
        browser.open(server.url)
        browser.until("document.getElementById('send').textContent === 'Send'")

        browser.run("document.getElementById('temperature').value = 0.2")

        def ask(messages: list[dict[str, str]]) -> None:
            body = {"model": "smollm2", "messages": messages, "max_tokens": 100}
            httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)

        with ThreadPoolExecutor(2) as others:
            asked = [others.submit(ask, question) for question in questions]
            time.sleep(10)  # for the page's charts
            for question in TALK:
                browser.run("document.getElementById('prompt').value = arguments[0]", question)
                browser.run("document.getElementById('answer-note').textContent = ''")
                browser.run("document.getElementById('send').click()")
                browser.until("/^[0-9]+ tokens/.test(document.getElementById('answer-note').innerText)")
            browser.until("document.getElementById('words').innerText.endsWith('.')")
            browser.picture(IMAGES / "live.png")
            for each in asked:
                each.cancel()
    in_few_colours(IMAGES / "live.png")


def draw_performance() -> None:
    tables = measured("operators")
    (run,) = tables["run"]
    title = f"llama-12x768, one process: {run['seconds']:.1f} s"
    operators.draw(IMAGES / "performance.png", title, tables["operators"])


def draw_policies() -> None:
    draw_winners(IMAGES / "policies.png", measured("every_policy")["cells"], tuple(POLICY_CONFIGS))


def measured(name: str) -> dict[str, list[Row]]:
    """Return the tables of a benchmark's latest measurement in `benchmarks/results`."""
    found: dict[str, list[Row]] = json.loads((RESULTS / f"{name}.json").read_text())["measurements"][-1]["tables"]
    return found


def in_few_colours(image: Path) -> None:
    """Convert a screenshot to a palette image, a third of the size."""
    from PIL import Image

    found = Image.open(image).convert("RGB")
    found.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(image, optimize=True)


def draw_report(folder: Path) -> None:
    from tests.support.browser import browsing

    with scratch() as downloads, browsing(downloads) as browser:
        browser.prefer("light")
        browser.resize(WIDTH, 900)
        browser.open((folder / "01_sarathi" / "report.html").resolve().as_uri())
        browser.until("document.querySelector('canvas') !== null")
        for name, selector in SECTIONS.items():
            browser.picture(IMAGES / f"reading_{name}.png", selector)
            in_few_colours(IMAGES / f"reading_{name}.png")
    for name, charts in CHARTS.items():
        for chart in charts.split():
            file = IMAGES / f"reading_{chart}.png"
            read_run(folder / name).plot(chart).savefig(file, dpi=150, metadata={"Software": None})


DRAWN = {"live": draw_live, "performance": draw_performance, "policies": draw_policies}

if __name__ == "__main__":
    sys.exit(main())
