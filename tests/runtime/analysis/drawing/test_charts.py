"""Tests of charts: their contents, how long series are thinned, and that SVG and PNG draw every kind."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.runtime.analysis.drawing import distributions, formatting, thinning
from gapless.runtime.analysis.drawing.chart import Axis, Chart, Series, extent, stacked_bars, ticks
from gapless.runtime.analysis.drawing.chart_data import ChartData, fleet_chart_data
from gapless.runtime.analysis.drawing.layout import WIDTH, Layout, Line, Text
from gapless.runtime.analysis.drawing.page_parts import template
from gapless.runtime.analysis.drawing.png import draw_chart, light_palette, write_figures
from gapless.runtime.analysis.drawing.svg import figure
from gapless.runtime.analysis.ledger.causes import CAUSES
from gapless.runtime.analysis.ledger.fleet import Fleet
from gapless.runtime.analysis.report import run_charts
from gapless.runtime.analysis.report.comparison_charts import pareto_front, throughput_against
from gapless.runtime.core.numbers import number_text
from gapless.runtime.core.run_record import RunRecord
from tests.support.hand_made import one_stage, run_group

Array = np.ndarray


def array(*values: float) -> Array:
    return np.array(values, np.float64)


def kinds() -> list[Chart]:
    """Return a chart of every kind, with names that XML must escape."""
    x, y = Axis("time <&>", "ms"), Axis('tokens "a"')
    lines = (Series("a & b", array(0, 1, 2), array(3, 1, 2), "s0"), Series("c", array(0, 2), array(0, 1), "s1"))
    edges = array(0, 1, 2, 3)
    stacked = (Series("d", edges, array(1, 2, 3), "chunk"), Series("e", edges, array(1, 0, 1), "decode"))
    pair = array(0, 1)
    bars = (Series("PB1", pair, array(1, 2), "pb1-prefill-size"), Series("t", pair, array(0, 1), "control"))
    named = (("<one>", 1, 5), ("two", 2, 6), ("three", 2.001, 6))
    points = tuple(Series("", array(x), array(y), "s0", name) for name, x, y in named)
    banded = (Series("k", array(0, 1, 2), array(2, 2, 2), "kv", band=(array(1, 1, 1), array(3, 4, 3))),)
    return [
        Chart("lines", "Lines <of> time", "lines", x, y, lines, note="a < b"),
        Chart("steps", "Steps", "steps", x, y, banded),
        Chart("cdf", "CDF", "cdf", x, Axis("share", "", 0.0, 1.0), (Series("p", array(1, 2), array(0.5, 1), "s2"),)),
        Chart("histogram", "Histogram", "histogram", x, y, stacked[:1], marks=(("p50", 1.5), ("p99", 9.0))),
        Chart("histograms", "Histograms", "histogram", x, y, stacked),
        Chart("areas", "Areas", "areas", x, y, stacked),
        Chart("bars", "Bars", "bars", x, Axis(""), bars, categories=("stage <0>", "a name too long for its row" * 3)),
        Chart("scatter", "Scatter", "scatter", x, y, points, line=((0, 0), (2, 6))),
    ]


def drawn(chart: Chart) -> ElementTree.Element:
    text = figure(chart)
    assert "NaN" not in text
    assert "inf" not in text
    return ElementTree.fromstring(text)


@pytest.mark.parametrize("chart", kinds(), ids=lambda chart: chart.name)
def test_svg_is_well_formed_and_inside_its_box(chart: Chart):
    root = drawn(chart)
    assert root.tag == "figure"
    assert root[0].text == chart.title
    svg = root.find("svg")
    assert svg is not None
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for path in svg.iter("path"):
        for x, y in re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", path.attrib["d"]):
            assert -1 <= float(x) <= width + 1, path.attrib
            assert -1 <= float(y) <= height + 1, path.attrib
    for rect in svg.iter("rect"):
        assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width + 1
    named = {s.colour for s in chart.series}
    used = set(re.findall(r"var\(--([\w-]+)\)", figure(chart)))
    assert named <= used
    assert all(f"--{name}:" in template("page.css") for name in used)


def test_svg_counts():
    by_name = {chart.name: drawn(chart) for chart in kinds()}
    assert len(list(by_name["histogram"].iter("rect"))) == 3
    assert len(list(by_name["bars"].iter("rect"))) == 3  # a bar of 0 is not drawn
    assert len(list(by_name["scatter"].iter("circle"))) == 3
    names = [text.text for text in by_name["scatter"].iter("text")]
    assert "<one>" in names
    assert ("two" in names) + ("three" in names) == 1  # they would lie on each other
    legend = [entry[0].tail for entry in by_name["scatter"].iter("li")]
    assert legend == ["<one>", "two", "three"]


def scatter_with(*marks: tuple[str, float], high: float | None = None) -> Chart:
    points = Series("", array(300, 1200, 2300), array(1, 2, 3), "s7")
    return Chart("s", "S", "scatter", Axis("p99", "ms", None, high), Axis("rate", low=None), (points,), marks)


@given(st.floats(-1e5, 1e5), st.none() | st.floats(1000, 9000))
def test_a_mark_is_drawn_at_its_value_or_as_an_arrow_that_names_it(value: float, high: float | None):
    chart = scatter_with(("SLO", value), high=high)
    layout = Layout(chart)
    lines = [shape for shape in layout.shapes() if isinstance(shape, Line) and shape.css == "mark"]
    (text,) = [shape for shape in layout.shapes() if isinstance(shape, Text) and "SLO" in shape.text]
    if layout.x0 <= value <= layout.x1:
        assert [line.parts[0][0][0] for line in lines] == [pytest.approx(layout.x(value))]
        assert text.text == "SLO"
    else:
        assert not lines
        assert number_text(value) in text.text
        assert text.text.endswith("\N{RIGHTWARDS ARROW}") == (value > layout.x1)
        assert text.text.startswith("\N{LEFTWARDS ARROW}") == (value < layout.x0)


def test_the_axis_grows_to_hold_an_slo_and_the_others_get_an_arrow(tmp_path: Path):
    near, far = scatter_with(("SLO", 4000.0)), scatter_with(("SLO", 400_000.0))
    (ticked,) = [element for element in drawn(near).iter("path") if element.get("class") == "mark"]
    assert ticked is not None
    assert not [element for element in drawn(far).iter("path") if element.get("class") == "mark"]
    assert "SLO 400,000 ms" in "".join(drawn(far).itertext())
    assert len(write_figures(tmp_path, [near, replace(far, name="far")])) == 2


def test_a_point_beyond_the_asked_end_is_drawn_at_its_own_place():
    (_, end), _ = extent(scatter_with(high=1000.0))
    assert end >= 2300


def test_an_empty_chart_says_so():
    chart = replace(kinds()[0], series=())
    assert "nothing measured" in figure(chart)
    assert write_figures(Path("/nowhere"), [chart]) == []


def test_png(tmp_path: Path):
    files = write_figures(tmp_path / "figures", kinds())
    assert [file.stem for file in files] == [chart.name for chart in kinds()]
    for file in files:
        head = file.read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", head[16:])
        assert width == 680  # 3.4 inches at 200 dpi
        assert height >= 369  # its drawing alone, of 190 by 350 units
    assert light_palette()["chunk"] == "#0b5d9e"


@pytest.mark.parametrize("chart", kinds(), ids=lambda chart: chart.name)
def test_a_figure_says_what_the_page_says(chart: Chart):
    from matplotlib.figure import Figure

    picture = Figure()
    draw_chart(chart, picture)
    head, plot = picture.axes
    labels = [element[0].tail for element in drawn(chart).iter("li")]
    page = [chart.title, *labels, *(element.text for element in drawn(chart).iter("text"))]
    texts = [text.get_text() for axes in (head, plot) for text in axes.texts]
    for text, said in zip(texts, page, strict=True):
        assert text.startswith(said.removesuffix("…")) if said.endswith("…") else text == said
    assert plot.get_ylim() == (Layout(chart).height, 0)
    for axes in (head, plot):
        places = [text.get_position() for text in axes.texts]
        assert all(0 <= x <= WIDTH and 0 <= y <= axes.get_ylim()[0] for x, y in places)


@pytest.mark.parametrize("count", [1, 5, 600, 601, 50_000])
def test_thinning_keeps_ends_and_extremes(count: int):
    rng = np.random.default_rng(count)
    x, y = np.arange(count, dtype=np.float64), rng.normal(size=count)
    y[count // 3], y[count // 2] = 99.0, -99.0
    a, b = thinning.thin(x, y)
    assert len(a) <= thinning.MAX_POINTS + 2
    assert (a[0], a[-1]) == (0, count - 1)
    assert (b.min(), b.max()) == (y.min(), y.max())
    assert (np.diff(a) > 0).all()
    assert set(zip(a.tolist(), b.tolist(), strict=True)) <= set(zip(x.tolist(), y.tolist(), strict=True))
    ends, shares = thinning.thin_cdf(np.sort(y))
    assert len(ends) <= thinning.MAX_POINTS
    assert (ends[0], ends[-1], shares[-1]) == (y.min(), y.max(), 1.0)
    assert np.interp(0.5, shares, ends) == pytest.approx(float(np.median(y)), abs=0.2 if count > 5 else 99)
    p, q = thinning.thin_points(y, -y)
    assert {float(p.min()), float(p.max())} == {float(y.min()), float(y.max())}
    assert len(p) <= max(4 * 64, 64 * 64)
    assert (q == -p).all()
    series = thinning.counter("", x, y, "kv")
    low, high = series.band or (series.y, series.y)
    assert (low.min(), high.max()) == (y.min(), y.max())
    assert (low <= series.y).all()
    assert (series.y <= high).all()


def test_an_average_over_time_keeps_the_sum():
    at, values = np.linspace(0, 100, 5001), np.random.default_rng(0).uniform(1, 9, 5001)
    edges, (mean,), averaged = thinning.average_over_time(at, [values], 101.0)
    assert averaged
    assert (len(edges), len(mean)) == (thinning.NUM_INTERVALS + 1, thinning.NUM_INTERVALS)
    counts, _ = np.histogram(at, edges)
    assert (mean * counts).sum() == pytest.approx(values.sum())
    edges, (same,), averaged = thinning.average_over_time(at[:9], [values[:9]], 7.0)
    assert not averaged
    assert edges.tolist() == [*at[:9], 7.0]
    assert (same == values[:9]).all()


@pytest.mark.parametrize(
    ("ends", "expected"),
    [((0, 1), [0, 0.25, 0.5, 0.75, 1.0]), ((0, 13), [0, 5, 10]), ((95, 105), [95, 97.5, 100, 102.5, 105])],
)
def test_ticks_are_round(ends: tuple[float, float], expected: Sequence[float]):
    assert ticks(*ends, 4) == pytest.approx(expected)


def test_whole_ticks():
    assert ticks(0, 2, 4, whole=True) == [0, 1, 2]
    assert formatting.tick_texts([0, 0.25, 0.5]) == ["0", "0.25", "0.50"]
    assert formatting.tick_texts([0, 5000, 10000]) == ["0", "5,000", "10,000"]


def test_a_distribution_with_a_tail():
    quantity = distributions.Quantity("n", "t", "time", "tokens")
    values = np.concatenate([np.full(990, 0.010), np.full(10, 0.5)])
    chart = distributions.histogram(quantity, {"": values})
    assert chart.x.unit == "ms"
    assert float(chart.series[0].y.sum()) == 1000  # none is lost beyond the axis
    assert dict(chart.marks)["p50"] == pytest.approx(10.0)
    curve = distributions.cdf(quantity, {"a": values})
    assert "p50 10.0 ms" in curve.series[0].label
    assert "500 ms" in curve.note


@pytest.fixture
def run() -> ChartData:
    record = one_stage()
    return fleet_chart_data(Fleet([record]))


def test_charts_of_a_run(run: ChartData):
    found = {chart.name: chart for chart in run_charts.charts_of_run(run)}
    assert found["bubble_time_per_request"].series[0].x.tolist() == [2.0, 2.0]
    completed = found["requests_completed"].series[0]
    assert completed.x.tolist() == [0.0, 6.0, 6.5, 6.5]
    assert completed.y.tolist() == [0, 1, 2, 2]
    decode, prefill = found["batch_composition"].series
    assert (decode.y.tolist(), prefill.y.tolist()) == ([0, 1, 2], [8, 4, 0])
    assert found["kv_use"].series[0].y.tolist() == [20, 50, 30, 30]
    bars = found["bubbles_by_stage"]
    total = sum(float(series.y.sum()) for series in bars.series)
    assert total == pytest.approx(sum(run.cause_seconds.values()))
    assert {series.label for series in bars.series} == {"control", "starved: all in flight", "starved: KV full"}
    assert "cv 0.35" in found["stage_times"].series[0].label
    assert found["predictions"].is_empty


def test_predictions_chart():
    record = one_stage()
    for micro_batch, seconds in zip(record.micro_batches, (1.1, 2.0, 0.8), strict=True):
        micro_batch.predicted = [seconds]
    found = {chart.name: chart for chart in run_charts.charts_of_run(fleet_chart_data(Fleet([record])))}
    series = found["predictions"].series[0]
    assert (series.x.tolist(), series.y.tolist()) == ([1, 2, 1], [1.1, 2.0, 0.8])
    assert "10.0% (p50)" in series.label


def test_charts_of_nothing():
    record = RunRecord(2, 0)
    for chart in run_charts.charts_of_run(fleet_chart_data(Fleet([record]))):
        assert chart.is_empty
        assert "nothing measured" in figure(chart)


def test_causes_have_their_colours(run: ChartData):
    chart = run_charts.bubbles_of_runs({"a": run})
    assert {series.colour for series in chart.series} <= {str(cause).replace("_", "-") for cause in CAUSES}
    assert {series.colour for series in chart.series} <= set(light_palette())


def test_throughput_against_the_tail_and_its_front():
    points = [
        run_group(f"c{n}", chunk=n, output_throughput=t, p99_itl_ms=n, p99_ttft_ms=9 - n)
        for n, t in ((1, 10), (2, 30), (3, 20), (4, 30), (5, 50))
    ]
    chart = throughput_against(points, "p99_itl_ms")
    assert [(s.name, float(s.x[0]), float(s.y[0])) for s in chart.series] == [
        ("c5", 5, 50),
        ("c2", 2, 30),
        ("c4", 4, 30),
        ("c3", 3, 20),
        ("c1", 1, 10),
    ]
    assert chart.line == ((1, 10), (2, 30), (5, 50))
    assert throughput_against(points, "p99_ttft_ms").line == ()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_the_front_is_what_none_beats(points: list[tuple[int, int]]):
    def beats(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return a != b and a[0] <= b[0] and a[1] >= b[1]

    unbeaten = {index for index, point in enumerate(points) if not any(beats(other, point) for other in points)}
    assert pareto_front(points) == unbeaten


def test_a_figure_has_room_for_long_titles_and_wide_names():
    from matplotlib.figure import Figure

    chart = stacked_bars("b", "A WIDE TITLE " * 5, Axis("x"), [("WWWWWWWWWWWWWWWW", {"part": 1.0})], {"part": "s0"})
    picture = Figure(dpi=200)
    draw_chart(chart, picture)
    for axes in picture.axes:
        for text in axes.texts:
            box = text.get_window_extent()
            assert -1 <= box.x0 < box.x1 <= picture.bbox.width + 1, text
