"""The measured cost model is exact at measured points and near the true law elsewhere; bad profiles are refused."""

from __future__ import annotations

import random
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.architecture import Architecture
from gapless.conf.build import build, load_group
from gapless.conf.errors import ConfigError
from gapless.conf.schema import SimulateConfig
from gapless.parallel.placement import StageLink
from gapless.runtime.engine.plan import make_plan
from gapless.runtime.simulation.cost.analytic import AnalyticOperators
from gapless.runtime.simulation.cost.interpolation import ChunkAttention, Curve, DecodeAttention
from gapless.runtime.simulation.cost.measured import MeasuredOperators, measured_host, pace, read_measured
from gapless.runtime.simulation.cost.operators import LAYER_LINEARS, HostTimes, Operators
from gapless.runtime.simulation.cost.profile_folder import (
    OPERATORS,
    About,
    OperatorSample,
    ProfileFolder,
    StageSample,
    shape_of,
)
from gapless.runtime.simulation.cost.profile_point import Point
from gapless.runtime.simulation.cost.stage_costs import MicroBatchShape, StageCosts
from gapless.runtime.simulation.pipeline.make_costs import make_control, make_costs
from gapless.runtime.simulation.profiling.grid import MessageMaker, mixed_points, operator_points, sent_points
from gapless.runtime.simulation.profiling.prediction_error import held_out_errors, send_errors, stage_errors

ARCH = Architecture(**load_group("model", "tiny")["architecture"])
ABOUT = About(
    model="tiny",
    shape=shape_of(ARCH),
    dtype="float32",
    attention="auto",
    hardware="cpu",
    device="cpu",
    tp=1,
    ranks=2,
    threads=1,
    num_layers=2,
    layers=[2, 2],
    block_size=16,
)


def law(point: Point, rank: int) -> dict[str, float]:
    """Return the seconds by operator of a machine for which they are known exactly."""
    rows = point.rows
    linear = {name: 1e-3 + 1e-5 * rows * (i + 1) for i, name in enumerate(LAYER_LINEARS)}
    attention = 2e-5 * point.decodes + 1e-7 * point.decodes * point.context
    if point.chunk:
        attention += 1e-8 * point.chunk * (point.prefix + point.chunk / 2)
    seconds = linear | {"attn": attention, "others": 2e-4 + 1e-6 * rows, "embedding": 1e-5 + 1e-6 * rows, "step": 3e-4}
    seconds["head"] = 1e-3 + 1e-4 * (point.decodes + point.sample) if rank else 1e-6
    return seconds | {"total": 0.0}


def measured(points: list[Point], noise: float = 0.0, samples: int = 3) -> list[OperatorSample]:
    draw = random.Random(0)
    return [
        OperatorSample(rank, point, {k: v * draw.uniform(1 - noise, 1 + noise) for k, v in law(point, rank).items()})
        for _ in range(samples)
        for point in points
        for rank in (0, 1)
    ]


GRID = operator_points(512, 1024, 16, 16)
SENDS = {rows: 1e-3 + 1e-6 * rows for rows in (1, 64, 1024)}


def test_the_grid_holds_what_curves_need() -> None:
    assert len(set(GRID)) == len(GRID)
    assert all(p.prefix + p.chunk <= 1024 and p.context <= 1024 and p.rows <= 512 for p in GRID)
    assert {p.decodes for p in GRID} >= {1, 2, 3, 4, 8, 16}
    assert {p.chunk for p in GRID if not p.prefix} >= {8, 12, 256, 384, 512}
    assert len({p.prefix for p in GRID}) >= 5
    tiled = {p.chunk for p in operator_points(1024, 2048, 4, 128)}
    assert tiled >= {128, 129, 256, 257, 384, 385, 1024}


@pytest.mark.parametrize("limits", [(16, 16, 1), (64, 2048, 3), (2048, 128, 32)])
def test_any_grid_keeps_its_limits_and_is_enough(limits: tuple[int, int, int]) -> None:
    tokens, context, decodes = limits
    points = operator_points(tokens, context, decodes, 16)
    for point in [*points, *mixed_points(*limits), *sent_points(tokens, context)]:
        assert 1 <= point.rows <= tokens + decodes
        assert max(point.prefix + point.chunk, point.context) <= max(context, 2)
    MeasuredOperators(measured(points))


@given(st.integers(1, 4000), st.just(0) | st.integers(16, 4000), st.integers(1, 40), st.integers(1, 4000))
def test_times_follow_the_law_within_and_beyond_the_grid(length: int, prefix: int, decodes: int, context: int) -> None:
    found = MeasuredOperators(measured(GRID), SENDS)
    for name in LAYER_LINEARS:
        expected = law(Point(chunk=max(length, 1)), 0)[name]
        assert found.linear(name, length) == pytest.approx(expected, rel=0.01)
    assert found.others(length) == pytest.approx(law(Point(chunk=length), 0)["others"], rel=0.01)
    assert found.embedding(length) == pytest.approx(law(Point(chunk=length), 0)["embedding"], rel=0.01)
    assert found.linear("head", decodes) == pytest.approx(1e-3 + 1e-4 * decodes, rel=0.01)
    assert found.decode_attention(decodes, decodes * context) == pytest.approx(
        2e-5 * decodes + 1e-7 * decodes * context, rel=0.02, abs=2e-5 * decodes
    )
    if length >= 16:
        expected = 1e-8 * length * (prefix + length / 2)
        assert found.chunk_attention(length, prefix) == pytest.approx(expected, rel=0.06)
    assert found.send(length, link=StageLink(True), scatter_gather=True) == pytest.approx(1e-3 + 1e-6 * length)
    assert found.host.step == pytest.approx(3e-4)


@given(st.dictionaries(st.integers(1, 5000), st.floats(1e-6, 1.0), min_size=1), st.integers(1, 20000))
def test_a_curve_meets_its_points_and_never_falls_beyond_them(points: dict[int, float], size: int) -> None:
    curve = Curve(points)
    for at, seconds in points.items():
        assert curve(at) == pytest.approx(seconds)
    assert curve(max(points) + size) >= points[max(points)]
    assert min(points.values()) * (1 - 1e-9) <= curve(min(size, max(points)))


def test_attention_is_a_law_of_length_and_prefix_of_its_own_without_one() -> None:
    square = ChunkAttention({(n, 0): 1e-6 * n * n for n in (16, 64, 256)} | {(64, p): 5e-4 * p for p in (16, 64)})
    assert square(32, 0) == pytest.approx(1e-6 * 32 * 32)
    assert square(1024, 0) == pytest.approx(1e-6 * 1024 * 1024)  # beyond: the triangle
    assert square(64, 32) == pytest.approx(5e-4 * 32)
    assert square(64, 128) == pytest.approx(5e-4 * 128)
    few = DecodeAttention({(1, 16): 1e-4, (1, 1024): 2e-4, (4, 16): 4e-4, (4, 1024): 8e-4, (3, 64): 1.0})
    assert few(2, 2 * 520) == pytest.approx(2 * 1.5e-4)


def test_medians_stand_against_outliers() -> None:
    samples = measured(GRID)
    samples += [s._replace(seconds={name: 50 * v for name, v in s.seconds.items()}) for s in samples[: len(GRID)]]
    assert MeasuredOperators(samples).linear("preproj", 100) == pytest.approx(1e-3 + 1e-3, rel=0.01)


def test_errors_are_those_of_held_out_points() -> None:
    exact = {error.what: error for error in held_out_errors(measured(GRID))}
    assert set(exact) == {*LAYER_LINEARS, "others", "embedding", "head", "attn, chunks", "attn, decodes"}
    assert max(error.p90 for error in exact.values()) < 0.06
    assert all(error.scatter == 0 for error in exact.values())
    noisy = {error.what: error for error in held_out_errors(measured(GRID, noise=0.4))}
    assert noisy["preproj"].median > 0.01
    assert noisy["preproj"].scatter > 0.05
    doubled = [
        s if s.point.rows not in (24, 32) else s._replace(seconds=s.seconds | {"postproj": 2 * s.seconds["postproj"]})
        for s in measured(GRID)
    ]
    assert {e.what: e.p90 > 0.05 for e in held_out_errors(doubled)}["postproj"]


def whole(point: Point, stage: int, in_flight: int = 2) -> StageSample:
    """Return the sample of a micro-batch on one of two stages with two layers each.

    The second layer of stage 1 computes keys and values of all rows, and all else of the rows that sample.
    """
    rank = law(point, stage)
    layer = last = sum(rank[name] for name in (*LAYER_LINEARS, "attn", "others"))
    num_sampled = point.decodes + point.sample
    if stage == 1 and num_sampled < point.rows:
        last = rank["preproj"] + 0.3 * rank["others"]
        if num_sampled:
            alone = law(Point(decodes=num_sampled), stage)
            last += sum(alone[name] for name in LAYER_LINEARS if name != "preproj") + 0.7 * alone["others"]
            keys = point.decodes * point.context + point.sample * (point.prefix + point.chunk)
            last += min(rank["attn"], 2e-5 * num_sampled + 1e-7 * keys)
    seconds = layer + last + rank["step"] + (rank["head"] if stage else rank["embedding"])
    return StageSample(in_flight, point, stage, seconds, 0.0, "input", None)


def test_whole_stages_are_the_sum_of_their_operators() -> None:
    found = MeasuredOperators(measured(GRID))
    points = mixed_points(512, 1024, 16)
    errors = stage_errors(StageCosts([2, 2], [found, found]), [whole(p, s) for p in points for s in (0, 1)])
    assert [error.what for error in errors] == ["stage 0", "stage 1"]
    assert max(error.p90 for error in errors) < 0.02
    alone = [whole(p, 1, in_flight=1)._replace(wait=1e-3 + 1e-6 * p.rows) for p in sent_points(512, 1024)]
    assert send_errors(alone)[0].p90 < 0.01


def test_a_pipeline_slower_than_its_operators_in_place_slows_them_down(tmp_path: Path) -> None:
    points = mixed_points(512, 1024, 16)
    slower = [whole(p, s)._replace(compute=1.25 * whole(p, s).compute) for p in points for s in (0, 1)]
    found = MeasuredOperators(measured(GRID))
    assert pace(found, [2, 2], slower) == pytest.approx(1.25, rel=0.01)
    assert pace(found, [2, 2], [s._replace(in_flight=1) for s in slower]) == 1.0
    folder = folder_with(tmp_path / "p", measured(GRID))
    before = read(folder.path)
    folder.add_stages(slower)
    after = read(folder.path)
    assert (before.host.stretch, after.host.stretch) == (1.0, pytest.approx(1.25, rel=0.01))
    shape = MicroBatchShape(((100, 0),), 4, 800, 5)
    as_in_place, in_pipeline = (StageCosts([2, 2], [source] * 2).seconds(shape) for source in (before, after))
    assert in_pipeline == pytest.approx([1.25 * seconds for seconds in as_in_place], rel=0.01)
    assert StageCosts([2, 2], [after] * 2, host=False).seconds(shape) < as_in_place
    assert after.has_sends


def test_a_profile_says_how_far_it_is_off(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "p", measured(GRID, samples=1))
    path = str(folder.path)
    without = read_measured(path, ARCH, pp=1, tp=1, dtype="float32").error
    assert (without.low, without.high) == (-0.05, 0.05)
    assert "no whole stages" in without.source
    points = mixed_points(512, 1024, 16)
    exact = [whole(p, s) for p in points for s in (0, 1)]
    off = np.array([(0.8, 1.0, 1.2)[number % 3] for number in range(len(exact))])
    folder.add_stages([s._replace(compute=s.compute * share) for s, share in zip(exact, off, strict=True)])
    error = read_measured(path, ARCH, pp=1, tp=1, dtype="float32").error
    slower = np.average(off, weights=[s.compute for s in exact])  # which the profile takes into its own times
    assert (error.low, error.high) == pytest.approx(tuple(np.percentile(off / slower, (10, 90)) - 1), abs=0.02)
    mixed = [p for p in points if p.chunk and p.decodes]
    assert f"{2 * len(mixed)} whole stages" in error.source


def test_control_is_the_median_of_what_was_between_micro_batches() -> None:
    point = Point(chunk=8)

    def samples(wait: float, bound: str, result: float, in_flight: int = 2) -> list[StageSample]:
        return [
            StageSample(in_flight, point, 0, 1.0, wait, bound, None),
            StageSample(in_flight, point, 1, 1.0, 0.5, "input", result),
        ]

    alone, crowded = samples(1e-3, "input", 9e-3, 1), samples(4e-4, "stage", 2e-3) + samples(6e-4, "stage", 4e-3)
    found = measured_host(measured(GRID), [2, 2], alone + crowded)
    assert (found.dispatch, found.result, found.turnaround) == (1e-3, pytest.approx(3e-3), pytest.approx(5e-4))
    assert found.step == pytest.approx(found.stretch * 3e-4)
    assert measured_host(measured(GRID), [2, 2], alone).result == 9e-3
    assert measured_host(measured(GRID), [2, 2], []) == HostTimes(step=pytest.approx(3e-4))


def folder_with(path: Path, samples: list[OperatorSample], about: About = ABOUT) -> ProfileFolder:
    folder = ProfileFolder(path)
    folder.begin(about, {"python": "3"})
    folder.add_operators(samples)
    folder.add_stages([whole(p, s, 1)._replace(wait=1e-3) for p in sent_points(512, 1024) for s in (0, 1)])
    return folder


def test_a_full_disk_leaves_no_part_of_a_row(tmp_path: Path) -> None:
    samples = measured(GRID, samples=1)
    folder, before = folder_with(tmp_path / "p", samples[:7]), resource.getrlimit(resource.RLIMIT_FSIZE)
    file = tmp_path / "p/operators.csv"
    size = file.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, before[1]))
    try:
        with pytest.raises(OSError, match=r"operators\.csv"):
            folder.add_operators(samples[7:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (file.stat().st_size, len(folder.operators())) == (size, 7)
    folder.add_operators(samples[7:])
    assert len(folder.operators()) == len(samples)


def test_a_folder_gives_back_what_was_measured(tmp_path: Path) -> None:
    samples = measured(GRID, samples=1)
    folder = folder_with(tmp_path / "p", samples[:7])
    before = folder.num_bytes
    folder.add_operators(samples[7:])
    assert folder.num_bytes > before
    assert folder.about() == ABOUT
    read_back = folder.operators()
    assert [(s.stage, s.point) for s in read_back] == [(s.stage, s.point) for s in samples]
    assert read_back[3].seconds == pytest.approx({name: samples[3].seconds[name] for name in OPERATORS}, abs=1e-9)
    assert folder.stages()[0].in_flight == 1
    about = yaml.safe_load((tmp_path / "p" / "profile.yaml").read_text())
    assert set(about) == {"format", "date", "machine", "versions", "measured"}
    assert about["machine"]["cores"] >= 1


def test_a_folder_takes_no_measurements_of_another_setting(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "p", [])
    folder.begin(ABOUT, {})
    with pytest.raises(ConfigError, match=r"p: contains measurements with threads=1, not 2; choose another folder"):
        folder.begin(replace(ABOUT, threads=2), {})
    with pytest.raises(ConfigError, match="with hidden_size=64, not 128"):
        folder.begin(replace(ABOUT, shape=ABOUT.shape | {"hidden_size": 128}), {})


def read(path: Path, arch: Architecture = ARCH, pp: int = 2, dtype: str = "float32") -> MeasuredOperators:
    return read_measured(str(path), arch, pp=pp, tp=1, dtype=dtype).operators


def test_what_is_no_profile_of_the_model_is_refused(tmp_path: Path) -> None:
    folder_with(tmp_path / "p", measured(GRID, samples=1))
    assert read(tmp_path / "p", replace(ARCH, num_layers=40, max_position=99)).send(
        1, link=StageLink(False), scatter_gather=True
    ) == pytest.approx(1e-3)
    with pytest.raises(ConfigError, match=r"simulation.profile=.*p: measured tiny with ffn_size=.*has ffn_size=7"):
        read(tmp_path / "p", replace(ARCH, ffn_size=7))
    with pytest.raises(ConfigError, match="measured tiny with dtype=float32; this model has dtype=bfloat16"):
        read(tmp_path / "p", dtype="bfloat16")
    with pytest.raises(ConfigError, match="contains no profile"):
        read(tmp_path / "none")
    folder_with(tmp_path / "few", measured(GRID[:3]))
    with pytest.raises(ConfigError, match="unfinished"):
        read(tmp_path / "few")
    alone = ProfileFolder(tmp_path / "alone")
    alone.begin(ABOUT, {})
    alone.add_operators(measured(GRID, samples=1))
    read(tmp_path / "alone", pp=1)
    with pytest.raises(ConfigError, match="has no sends between stages; gapless profile parallel=pp2 measures them"):
        read(tmp_path / "alone")


def test_a_profile_of_stages_over_other_nodes_is_refused(tmp_path: Path) -> None:
    """The all-reduces of two ranks on one node say nothing of two ranks on two nodes, nor the other way round."""
    for name, nodes in (("one", 1), ("two", 2)):
        folder = ProfileFolder(tmp_path / name)
        folder.begin(replace(ABOUT, tp=2, nodes=nodes), {})
        folder.add_operators(measured(GRID, samples=1))

    def read(name: str, devices_per_node: int) -> None:
        read_measured(str(tmp_path / name), ARCH, pp=1, tp=2, dtype="float32", devices_per_node=devices_per_node)

    read("one", 2)
    read("two", 1)
    with pytest.raises(ConfigError, match=r"over 1 node; with cluster\.devices_per_node=1 and .* spans 2 nodes$"):
        read("one", 1)
    with pytest.raises(ConfigError, match=r"over 2 nodes; .* spans 1 node$"):
        read("two", 8)


def simulated(path: Path, **keys: object) -> SimulateConfig:
    mapping = {
        "model": load_group("model", "tiny"),
        "hardware": load_group("hardware", "cpu"),
        "parallel": load_group("parallel", "pp2"),
        "simulation": {"profile": str(path), **keys},
    }
    return build(SimulateConfig, mapping)


def test_a_profile_stands_for_the_hardware_that_it_was_measured_on(tmp_path: Path) -> None:
    folder_with(tmp_path / "p", measured(GRID, samples=1))
    alike = simulated(tmp_path / "p", dispatch_ms=2.0)
    first, second = make_costs(alike, make_plan(alike)).operators
    assert first is second
    assert isinstance(first, MeasuredOperators)
    assert make_control(alike, make_plan(alike)).dispatch == pytest.approx(2e-3 + 1e-3)
    mixed = simulated(tmp_path / "p", devices=["cpu", "a100-80g"])
    first, second = make_costs(mixed, make_plan(mixed)).operators
    assert isinstance(first, MeasuredOperators)
    assert isinstance(second, AnalyticOperators)
    without = simulated(tmp_path / "p", host=False)
    assert make_control(without, make_plan(without)) == HostTimes()
    analytic = simulated(tmp_path / "p", cost="analytic")
    with pytest.raises(ConfigError, match=r"hardware=cpu: has no cost constants.*simulation\.profile=FOLDER"):
        make_costs(analytic, make_plan(analytic))


def test_runs_of_one_process_share_what_they_have_costed() -> None:
    def operators(model: str = "tiny", **keys: object) -> Operators:
        mapping = {
            "model": load_group("model", model),
            "parallel": load_group("parallel", "pp2") | keys,
            "hardware": load_group("hardware", "a100-80g"),
        }
        config = build(SimulateConfig, mapping)
        return make_costs(config, make_plan(config)).operators[0]

    assert operators() is operators() is operators(depth=3, layers=[1, 3])
    assert operators() is not operators(tp=2)
    assert operators() is not operators("llama-160m")


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("profile.yaml", "format: [", r"profile\.yaml is damaged"),
        ("profile.yaml", "format: 7", "has profile format 7, not 1; measure it again"),
        ("profile.yaml", "format: 1", r"profile\.yaml is damaged"),
        ("operators.csv", "rank,chunk\n1,x\n", r"operators\.csv is damaged"),
        ("stages.csv", "stage\n1\n", r"stages\.csv is damaged"),
    ],
)
def test_damage_is_reported_in_one_line(tmp_path: Path, file: str, text: str, error: str) -> None:
    folder_with(tmp_path / "p", measured(GRID, samples=1))
    (tmp_path / "p" / file).write_text(text)
    with pytest.raises(ConfigError, match=error) as caught:
        read(tmp_path / "p")
    assert "\n" not in str(caught.value)


def test_the_message_of_a_point_is_the_same_load() -> None:
    maker = MessageMaker(1000, 16)
    for point in [*mixed_points(512, 1024, 16), *GRID[::7]]:
        micro_batch = maker.make(point, first_block=3)
        shape = MicroBatchShape.of(micro_batch)
        assert (shape.rows, shape.decodes, shape.context) == (point.rows, point.decodes, point.decodes * point.context)
        assert shape.chunks == (((point.chunk, point.prefix),) if point.chunk else ())
        assert shape.sampled == point.decodes + point.sample
        owned = [b for c in micro_batch.chunks for b in c.blocks] + [
            b for bs in micro_batch.decodes.blocks.values() for b in bs
        ]
        assert owned == list(range(3, 3 + point.slots(16) // 16))
    assert micro_batch.dropped


def test_constants_give_the_host_between_micro_batches_as_a_profile_does() -> None:
    host = {"dispatch_us": 100.0, "result_us": 200.0, "turnaround_us": 50.0}
    hardware = load_group("hardware", "a100-80g")
    slow = hardware | {"costs": hardware["costs"] | {"eager_host": host}}
    mapping = {"model": load_group("model", "tiny"), "hardware": slow, "parallel": load_group("parallel", "pp2")}
    eager = build(SimulateConfig, mapping | {"simulation": {"launch": "eager", "result_ms": 1.0}})
    found = make_control(eager, make_plan(eager))
    assert (found.dispatch, found.result, found.turnaround) == pytest.approx((1e-4, 12e-4, 5e-5))
    config = build(SimulateConfig, mapping)
    graphs = make_control(config, make_plan(config))
    assert (graphs.dispatch, graphs.result, graphs.turnaround) == (0.0, 0.0, 0.0)
