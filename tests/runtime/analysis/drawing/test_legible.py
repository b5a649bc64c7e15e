"""Tests that pages can be read: contrast of their colours, size of their text, and width on a small screen."""

from __future__ import annotations

import html
import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gapless.runtime.analysis.drawing.formatting import css_name
from gapless.runtime.analysis.drawing.page_parts import HATCHES, template
from gapless.runtime.analysis.ledger.causes import CAUSES
from gapless.runtime.analysis.report.run_groups import group_runs
from gapless.runtime.analysis.report.write_comparison import write_comparison
from gapless.runtime.analysis.run_folder.read import read_run_folder
from tests.runtime.analysis.report.test_run_page import CHROMIUM, page_of, simulated_run
from tests.support.hand_made import config
from tests.support.tiers import HANGS_S
from tests.support.written_runs import write_run


def palettes() -> dict[str, dict[str, str]]:
    """Return the hex colours of the style sheet, light and dark."""
    light, dark = (part.split("}", 1)[0] for part in template("page.css").split(":root {")[1:])
    found = {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text)) for name, text in (("light", light), ("dark", dark))
    }
    return {"light": found["light"], "dark": found["light"] | found["dark"]}


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, as WCAG 2 defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_wcag():
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_every_cause_and_series_stands_out_from_the_panel(mode: str):
    palette = palettes()[mode]
    drawn = ["chunk", "decode", "busy", "kv", "queue", *map(css_name, CAUSES), *(f"s{n}" for n in range(8))]
    faint = {name: contrast(palette[name], palette["panel"]) for name in drawn}
    assert {name: round(ratio, 2) for name, ratio in faint.items() if ratio < 3.0} == {}


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_stands_out(mode: str):
    palette = palettes()[mode]
    pairs = [
        ("ink", "panel"),
        ("soft", "panel"),
        ("ink", "ground"),
        ("soft", "ground"),
        ("on-chunk", "chunk"),
        ("on-decode", "decode"),
    ]
    assert {pair for pair in pairs if contrast(palette[pair[0]], palette[pair[1]]) < 4.5} == set()


def test_causes_that_follow_each_other_differ_in_their_hatch():
    assert all(HATCHES[one] != HATCHES[other] for one, other in pairwise(CAUSES))
    for name in set(HATCHES.values()):
        assert f".{name} {{ background-image:" in template("page.css")


def test_no_text_is_smaller_than_12_px():
    for name in ("page.css", "timeline.js", "timeline_style.js"):
        found = re.findall(r"(?:font(?:-size)?: |font = \"(?:\d+ )?)([\d.]+)px", template(name))
        assert [size for size in found if float(size) < 12] == [], name


PROBE = """<script>
addEventListener("load", () => setTimeout(() => {
  const small = new Set(), root = document.documentElement;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), holder = walker.currentNode.parentElement;
    if (!text || !holder.getClientRects().length || ["SCRIPT", "STYLE"].includes(holder.tagName)) continue;
    const scale = holder.getScreenCTM ? holder.getScreenCTM().a : 1;
    const size = parseFloat(getComputedStyle(holder).fontSize) * scale;
    if (size < 11.99) small.add(holder.tagName + " " + size.toFixed(1) + ": " + text.slice(0, 30));
  }
  parent.document.body.dataset.probe = JSON.stringify({
    width: innerWidth, wide: root.scrollWidth, small: [...small].slice(0, 9),
  });
}, 300));
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 700])
@pytest.mark.parametrize("kind", ["run", "comparison", "difference"])
def test_a_small_screen_shows_all_text_at_12_px_and_does_not_scroll_sideways(kind: str, width: int, tmp_path: Path):
    if kind == "run":
        page = page_of(simulated_run(4, 300))
    else:
        folders = []
        for chunk in (256, 128, 64) if kind == "comparison" else (256, 128):
            write_run(tmp_path / str(chunk), simulated_run(2, 100, seed=chunk), config(chunk=chunk))
            folders.append(read_run_folder(tmp_path / str(chunk)))
        write_comparison(tmp_path, group_runs(folders), figures=False)
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
    inside = html.escape(page.replace("</body>", PROBE))
    framed = f'<!doctype html><body><iframe srcdoc="{inside}" style="border:0;width:{width}px;height:2000px"></iframe>'
    (tmp_path / "page.html").write_text(framed, encoding="utf-8")  # a window itself cannot be so narrow
    assert probed(tmp_path) == {"width": width, "wide": width, "small": []}


def probed(tmp_path: Path) -> Any:
    """Return what the probe in `page.html` found, in a browser."""
    flags = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking"
    flags += f" --window-size=1400,2000 --user-data-dir={tmp_path / 'profile'} --dump-dom"
    done = subprocess.run(
        [str(CHROMIUM), *flags.split(), "--virtual-time-budget=5000", (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


GESTURES = """<script>
requestAnimationFrame = paint => setTimeout(paint, 16);  // a browser without a window may paint no frames
addEventListener("load", () => setTimeout(async () => {
  while (!document.body.dataset.drawn) await new Promise(done => setTimeout(done, 50));
  const picture = document.querySelector(".picture"), overlay = picture.querySelector(".overlay");
  const box = overlay.getBoundingClientRect(), y = box.top + 80, seen = {};
  const frame = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  const size = () => { const [from, to] = picture.dataset.view.split(","); return to - from; };
  const span = JSON.parse(document.getElementById("head").textContent).span;
  const wheel = keys => {
    const at = { clientX: box.left + 400, clientY: y };
    const event = new WheelEvent("wheel", { deltaY: -100, cancelable: true, ...at, ...keys });
    overlay.dispatchEvent(event);
    return event.defaultPrevented;
  };
  const finger = (what, pointerId, x) => overlay.dispatchEvent(new PointerEvent("pointer" + what,
    { pointerId, pointerType: "touch", clientX: box.left + x, clientY: y }));
  overlay.setPointerCapture = () => {};
  seen.first = size() / span;
  seen.wheel_scrolls_the_page = !wheel({});
  await frame();
  seen.after_wheel = size() / span;
  seen.ctrl_wheel_zooms = wheel({ ctrlKey: true });
  await frame();
  const before = size();
  seen.closer_by_ctrl_wheel = before < span;
  finger("down", 1, 300); finger("down", 2, 400); finger("move", 1, 250); finger("move", 2, 450);
  await frame();
  seen.pinch = Math.round(100 * size() / before) / 100;
  finger("up", 1, 250); finger("up", 2, 450);
  document.body.dataset.probe = JSON.stringify(seen);
}, 300));
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_timeline_opens_on_the_whole_run_and_the_wheel_alone_scrolls_the_page(tmp_path: Path):
    page = page_of(simulated_run(2, 300)).replace("</body>", GESTURES)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    assert probed(tmp_path) == {
        "first": 1,
        "wheel_scrolls_the_page": True,
        "after_wheel": 1,
        "ctrl_wheel_zooms": True,
        "closer_by_ctrl_wheel": True,
        "pinch": 0.5,
    }
