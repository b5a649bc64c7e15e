"""The fit of a device's constants: it finds what made the times, and reads the files that measurements come in."""

from __future__ import annotations

import csv
import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fit_costs
from benchmarks.support import fitting
from benchmarks.support import measurements as m
from benchmarks.support.least_squares import Array
from benchmarks.support.operator_tables import OperatorTables
from gapless.conf.build import load_hardware
from gapless.conf.costs import AttentionKernels, CostsConfig

KERNELS: tuple[AttentionKernels, ...] = ("flashinfer", "flash_attention")


def costs() -> CostsConfig:
    found = load_hardware("a100-80g").costs
    assert found is not None
    return found


def synthetic(true: CostsConfig) -> OperatorTables:
    """Return what a device of exactly these constants would measure."""
    cores = true.multiprocessors
    shapes = [(k, n) for k in (1024, 4096, 11008) for n in (1536, 4096, 22016)]
    counts = (1, 48, 160, 520, 2049)
    products = [m.MatrixProduct("m", 4096, "preproj", 1, rows, k, n, 0.0) for k, n in shapes for rows in counts]
    rows = [m.RowKernel("m", "norm", 1, count, 4096, 16384, 0.0) for count in (1, 64, 512, 4096)]
    chunks = [
        m.ChunkKernel(32, 4, 128, length, prefix, 0.0) for length in (64, 320, 1024, 4096) for prefix in (0, 512, 2048)
    ]
    decodes = [m.DecodeKernel(32, 4, 128, n, context, 0.0) for n in (1, 8, 24, 40, 100) for context in (64, 512, 4000)]
    messages = [m.Message(ranks, 1 << power, 0.0) for ranks in (2, 8) for power in range(10, 30, 2)]

    def timed(measured: list, seconds: Array) -> list:  # type: ignore[type-arg]
        return [each._replace(seconds=float(s)) for each, s in zip(measured, seconds, strict=True)]

    return OperatorTables(
        timed(products, fitting.products_seconds(true.gemm, products, cores)),
        timed(rows, fitting.rows_seconds(true.pointwise, rows)),
        {name: timed(chunks, fitting.chunks_seconds(true.attention.of(name), chunks, cores)) for name in KERNELS},
        {name: timed(decodes, fitting.decodes_seconds(true.attention.of(name), decodes, cores)) for name in KERNELS},
        all_reduce={"dgx_all_reduce": timed(messages, fitting.messages_seconds(true.all_reduce, messages))},
    )


def test_arrays_and_numbers_give_the_same_times() -> None:
    """The fit computes over arrays what a simulation computes one by one."""
    from gapless.runtime.simulation.cost.gemm import Gemm, Products

    gemm = Gemm(costs().gemm, costs().multiprocessors, m.ELEMENT)
    for product in synthetic(costs()).products:
        products = Products(gemm, [(64, 96), (product.inputs, product.outputs)])
        assert products.seconds(product.rows)[1] == pytest.approx(product.seconds)


def test_a_fit_finds_what_made_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "STARTS", 1)
    true = costs()
    gemm = dataclasses.replace(
        true.gemm,
        tflops=tuple(0.85 * rate for rate in true.gemm.tflops),
        memory_gigabytes_per_s=1.3 * true.gemm.memory_gigabytes_per_s,
        launch_us=6.0,
    )
    wrong = {"chunk_tflops": 120.0, "decode_gigabytes_per_s": 1400.0, "decode_launch_us": 6.0}
    families = {name: dataclasses.replace(true.attention.of(name), **wrong) for name in KERNELS}
    attention = dataclasses.replace(true.attention, **families)
    all_reduce = dataclasses.replace(true.all_reduce, least_us=20.0, ramp_us=60.0, gigabytes_per_s=90.0, knee=3.0)
    start = dataclasses.replace(true, gemm=gemm, attention=attention, all_reduce=all_reduce)
    measured = synthetic(true)
    found = fitting.fit_all(measured, start)
    cores = true.multiprocessors

    def off(predicted: Array, against: list) -> float:  # type: ignore[type-arg]
        return float(np.max(np.abs(predicted / np.array([each.seconds for each in against]) - 1)))

    assert off(fitting.products_seconds(found.gemm, measured.products, cores), measured.products) < 0.02
    for name in KERNELS:
        config, chunks, decodes = found.attention.of(name), measured.chunks[name], measured.decodes[name]
        assert off(fitting.chunks_seconds(config, chunks, cores), chunks) < 0.01, name
        assert off(fitting.decodes_seconds(config, decodes, cores), decodes) < 0.01, name
    assert found.all_reduce.gigabytes_per_s == pytest.approx(true.all_reduce.gigabytes_per_s, rel=0.02)
    assert found.all_reduce.least_us == pytest.approx(true.all_reduce.least_us, rel=0.02)
    assert found.node == true.node, "what was not measured stays"


def test_rows_are_held_out_by_size() -> None:
    kept, out = synthetic(costs()).split()
    assert {p.rows for p in kept.products} == {1, 160, 520}
    assert {p.rows for p in out.products} == {48, 2049}
    sizes = {message.size for message in kept.all_reduce["dgx_all_reduce"]}
    assert sizes.isdisjoint(message.size for message in out.all_reduce["dgx_all_reduce"])


def test_the_table_of_errors_tells_what_is_off() -> None:
    measured = synthetic(costs())
    slower = [p._replace(seconds=p.seconds * 1.25) for p in measured.products]
    rows = fitting.errors_of(costs(), dataclasses.replace(measured, products=slower))
    off = {row["of"]: (row["median_share"], row["p90_share"]) for row in rows}
    assert off["matrix products"] == pytest.approx((0.2, 0.2))
    for name in KERNELS:
        assert off[f"{name}, chunks"] == off[f"{name}, decodes"] == pytest.approx((0, 0), abs=1e-9)


def write(path: Path, lines: list[dict[str, object]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a few measurements in Vidur's form: milliseconds, an empty cell where there is none."""
    shape = {"n_embd": 8192, "n_kv_head": 8, "num_tensor_parallel_workers": 2}
    linear = shape | {"n_head": 64, "n_expanded_embd": 28672, "use_gated_mlp": True, "num_tokens": 256}
    write(
        tmp_path / "mlp_some-70b.csv.gz",
        [linear | {"time_stats.mlp_up_proj.median": ms, "time_stats.add.median": ""} for ms in (0.5, 0.7, 0.9)],
    )
    batch = {"batch_size": 4, "prefill_chunk_size": 0, "kv_cache_size": 1024, "is_prefill": False}
    times = {
        "time_stats.attn_decode.median": 0.05,
        "time_stats.attn_prefill.median": "",
        "time_stats.attn_output_reshape.median": 0.002,
    }
    write(tmp_path / "attention_some.csv.gz", [shape | {"n_q_head": 64} | batch | times])
    write(
        tmp_path / "dgx_all_reduce.csv.gz",
        [
            {"time_stats.all_reduce.median": 0.1, "num_workers": 4, "devices_per_node": per_node, "size": 1 << 20}
            for per_node in (2, 4)
        ],
    )
    write(
        tmp_path / "send_inter_node_by_hidden_size.csv.gz",
        [
            {"time_stats.send_recv.median": 0.2, "n_embd": 8192, "num_tokens": tokens, "num_tensor_parallel_workers": 4}
            for tokens in (0, 512)
        ],
    )
    return tmp_path


def test_measurements_are_read(folder: Path) -> None:
    measured = m.read(folder)
    assert measured.products == [m.MatrixProduct("some-70b", 8192, "ffn_ln1", 2, 256, 8192, 28672, 0.7e-3)]
    assert measured.decodes == {"flash_attention": [m.DecodeKernel(32, 4, 128, 4, 1024, 0.05e-3)]}
    assert measured.rows == [m.RowKernel("", "copy", 2, 4, 0, 16384, 2e-6)]
    assert measured.all_reduce == {"dgx_all_reduce": [m.Message(4, 1 << 20, 0.1e-3)]}  # of one node alone
    assert measured.network == {"send_inter_node_by_hidden_size": [m.Message(1, 512 * 8192 * 2 // 4, 0.2e-3)]}
    assert measured.chunks == {}
    assert measured.node == {}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["fit_costs", *arguments])
    return fit_costs.main()


def test_the_command_checks_a_hardware(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, str(folder), "--check", "hardware=a100-80g") == 0
    out = capsys.readouterr().out
    assert out.startswith("\nhardware=a100-80g against all measurements")
    assert {"matrix products", "flash_attention, decodes"} <= {line.split("  ")[0] for line in out.splitlines()}
    assert run(monkeypatch, str(folder), "--check", "hardware=a100") == 2
    assert "did you mean 'a100-80g'?" in capsys.readouterr().err
    assert run(monkeypatch, str(folder), "--check", "hardware=cpu") == 2
    assert "hardware=cpu: has no constants" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(monkeypatch, str(tmp_path / "empty")) == 2
    assert "contains no table" in capsys.readouterr().err
