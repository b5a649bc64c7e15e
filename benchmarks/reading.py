"""Makes the runs and pictures of `docs/reading_a_report.md`: `python -m benchmarks.reading`.

One `gapless bench` of two policies over two stages; pictures are parts of the first run's page, as a browser shows
them, and its charts. They say how a report looks: no document takes a number from them. Two minutes on 2 cores;
`--draw` only draws the runs that are there. It needs Chromium and its driver.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from gapless import Run, read_run
from gapless.launch.cli import main as gapless
from tests.support.browser import Browser, browsing

IMAGES = Path("docs/images")
FOLDER = Path("runs/reading")
COMMAND = (
    "bench model=llama-160m parallel=pp2 parallel.threads=1 cache.num_blocks=320 scheduler=sarathi,equal_time "
    "scheduler.chunk=96 scheduler.batch=4 workload=fixed workload.input_len=400 workload.range_ratio=0.8 "
    "workload.output_len=40 workload.num_prompts=24 workload.request_rate=2"
)
SECTIONS = {"cards": ".cards", "timeline": "#pipeline", "idle": "section:has(table.bubbles)"}  # of the page
CHARTS = {  # by run: those that the page shows
    "01_sarathi": ("stage_times", "batch_composition", "kv_use", "queue", "bubble_time_per_request",
                   "requests_completed", "ttft", "itl"),
    "02_equal_time": ("predictions",),
}  # fmt: skip
WIDTH = 1100  # CSS pixels of the page


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the bench of docs/reading_a_report.md and draw its pictures.")
    parser.add_argument("--draw", action="store_true", help="only draw the runs that are there")
    if not parser.parse_args().draw and (code := gapless([*shlex.split(COMMAND), f"hydra.run.dir={FOLDER}"])):
        return code
    with tempfile.TemporaryDirectory() as folder, browsing(Path(folder)) as browser:
        browser.prefer("light")
        browser.resize(WIDTH, 900)
        browser.open((FOLDER / "01_sarathi" / "report.html").resolve().as_uri())
        browser.until("document.querySelector('canvas') !== null")
        for name, selector in SECTIONS.items():
            picture(browser, selector, IMAGES / f"reading_{name}.png")
    for name, charts in CHARTS.items():
        run: Run = read_run(FOLDER / name)
        for chart in charts:
            file = IMAGES / f"reading_{chart}.png"
            run.plot(chart).savefig(file, dpi=150, metadata={"Software": None})
            print(file)
    return 0


def picture(browser: Browser, selector: str, file: Path) -> None:
    """Write a PNG of one element of the page."""
    browser.picture(file, selector)
    print(file)


if __name__ == "__main__":
    sys.exit(main())
