"""Published operator tables are read, and a fit to them finds the constants that made them."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import yaml

from benchmarks import fit_costs
from benchmarks.support import fitting
from benchmarks.support.operator_tables import (
    ChunkKernel,
    DecodeKernel,
    ExpertLayer,
    MatrixProduct,
    Message,
    OperatorTables,
)
from benchmarks.support.published import read_published
from gapless.conf.build import build, load_hardware
from gapless.conf.costs import CostsConfig
from gapless.conf.errors import ConfigError

KERNELS = "flash_attention3"


def true_costs() -> CostsConfig:
    """Return constants of a device that is half as fast as an H200 in some ways."""
    costs = load_hardware("h200").costs
    assert costs is not None
    assert costs.graph_all_reduce is not None
    kernels = dataclasses.replace(costs.attention.of(KERNELS), decode_gigabytes_per_s=2000.0, decode_launch_us=20.0)
    return dataclasses.replace(
        costs,
        gemm=dataclasses.replace(costs.gemm, memory_gigabytes_per_s=2000.0, fp8_rate=1.5, grouped_rate=0.5),
        attention=dataclasses.replace(costs.attention, flash_attention3=kernels),
        graph_all_reduce=dataclasses.replace(costs.graph_all_reduce, least_us=9.0, gigabytes_per_s=150.0),
    )


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    lines = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def write_tables(folder: Path, costs: CostsConfig) -> None:
    """Write tables in aiconfigurator's layout, as a device of these constants would fill them."""
    cores = costs.multiprocessors
    sizes = [(rows, k, n) for rows in (1, 64, 256, 2048) for k in (1024, 8192) for n in (1024, 8192)]
    products = [MatrixProduct("", 0, "", 1, *each, 0.0) for each in sizes]
    found = []
    for dtype, weights in (("bfloat16", None), ("fp8", fitting.FORMATS["fp8_rate"])):
        times = fitting.products_seconds(costs.gemm, products, cores, weights)
        for product, seconds in zip(products, times, strict=True):
            of = {"gemm_dtype": dtype, "m": product.rows, "n": product.outputs, "k": product.inputs}
            found.append({**of, "latency": 1e3 * seconds})
    write(folder / "gemm_perf.txt", found)
    decodes = [DecodeKernel(32, 8, 128, n, c, 0.0) for n in (1, 8, 64) for c in (512, 2048, 8192)]
    times = fitting.decodes_seconds(costs.attention.of(KERNELS), decodes, cores)
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "kv_cache_dtype": "bfloat16"}
    write(
        folder / "generation_attention_perf.txt",
        (
            {**heads, "batch_size": each.requests, "isl": 1, "step": each.context - 1, "latency": 1e3 * seconds}
            for each, seconds in zip(decodes, times, strict=True)
        ),
    )
    chunks = [ChunkKernel(32, 8, 128, length, 0, 0.0, n) for n in (1, 4) for length in (64, 512, 4096)]
    times = fitting.chunks_seconds(costs.attention.of(KERNELS), chunks, cores)
    write(
        folder / "context_attention_perf.txt",
        (
            {**heads, "batch_size": each.prompts, "isl": each.length, "step": 0, "latency": 1e3 * seconds}
            for each, seconds in zip(chunks, times, strict=True)
        ),
    )
    messages = [Message(ranks, 1 << power, 0.0) for ranks in (2, 8) for power in range(8, 28, 3)]
    assert costs.graph_all_reduce is not None
    times = fitting.messages_seconds(costs.graph_all_reduce, messages)
    of_graph = [
        {"kernel_source": "vLLM_custom_graph", "num_gpus": m.ranks, "message_size": m.size // 2, "latency": 1e3 * s}
        for m, s in zip(messages, times, strict=True)
    ]
    eager = [{**row, "kernel_source": "vLLM_custom_eager", "latency": 1.0} for row in of_graph]
    write(folder / "custom_allreduce_perf.txt", [*of_graph, *eager])
    layers = [ExpertLayer(4096, 2048, 8, 2, rows, 0.0) for rows in (16, 512, 4096)]
    times = fitting.experts_seconds(costs, layers)
    shape = {"moe_dtype": "bfloat16", "hidden_size": 4096, "inter_size": 4096, "moe_tp_size": 2, "moe_ep_size": 1}
    write(
        folder / "moe_perf.txt",
        (
            {**shape, "num_experts": 8, "topk": 2, "distribution": "balanced", "num_tokens": e.rows, "latency": 1e3 * s}
            for e, s in zip(layers, times, strict=True)
        ),
    )


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    write_tables(tmp_path / "h200_sxm" / "0.18.0", true_costs())
    return tmp_path / "h200_sxm"


def test_tables_are_read(tables: Path) -> None:
    found = read_published(tables, KERNELS)
    assert {product.operator for product in found.products} == {"bfloat16"}
    assert set(found.quantized) == {"fp8_rate"}
    assert {decode.context for decode in found.decodes[KERNELS]} == {512, 2048, 8192}
    assert {chunk.prompts for chunk in found.chunks[KERNELS]} == {1, 4}
    (messages,) = found.graph_all_reduce.values()
    assert max(message.seconds for message in messages) < 0.1, "not those out of a graph"
    assert not found.all_reduce
    assert found.experts[0][:5] == (4096, 2048, 8, 2, 16)


def test_a_copy_with_fewer_columns_is_read_by_its_device(tmp_path: Path) -> None:
    for device, us in (("h100", 7.0), ("h200", 5.0)):
        rows = [{"gemm_dtype": "bfloat16", "m": 1, "n": 4096, "k": 4096, "latency_us": us}]
        write(tmp_path / f"{device}_gemm.csv", rows)
        collectives = [
            {"op": op, "by": by, "num_gpus": 8, "bytes": 1024, "latency_us": us}
            for op, by in (("all_reduce", "nccl"), ("all_gather", "nccl"), ("all_reduce", "custom_graph"))
        ]
        write(tmp_path / f"{device}_collectives.csv", collectives)
    found = read_published(tmp_path, KERNELS, "h200")
    assert [product.seconds for product in found.products] == [pytest.approx(5e-6)]
    for kind in (found.all_reduce, found.graph_all_reduce):
        assert [list(messages) for messages in kind.values()] == [[Message(8, 1024, pytest.approx(5e-6))]]
    with pytest.raises(ConfigError, match="several tables gemm_perf"):
        read_published(tmp_path, KERNELS)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("m,n,k,latency\n1,1024,1024,0.1\n", "not a table of products"),
        ("gemm_dtype,m,n,k,latency\nbfloat16,1,1024,1024,fast\n", "not a table of products"),
    ],
    ids=["pointer", "column", "number"],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match="contains no table"):
        read_published(tmp_path, KERNELS)
    (tmp_path / "gemm_perf.txt").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=wrong):
        read_published(tmp_path, KERNELS)


def test_every_third_size_is_held_out(tables: Path) -> None:
    measured = read_published(tables, KERNELS)
    kept, out = measured.split()
    assert {product.rows for product in out.products} == {64}
    assert {product.rows for product in kept.products} == {1, 256, 2048}
    assert {layer.rows for layer in out.experts} == {512}
    assert OperatorTables().are_any is False


def test_a_fit_to_tables_finds_what_made_them(
    tables: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fitting, "STARTS", 1)
    monkeypatch.setattr("sys.argv", ["fit_costs", str(tables), "--base", "h200", "--quick"])
    assert fit_costs.main() == 0
    block = capsys.readouterr().out.partition("costs:")[2].partition("\n\n")[0]
    found, true = build(CostsConfig, yaml.safe_load("costs:" + block)["costs"], "costs"), true_costs()
    sizes = [MatrixProduct("", 0, "", 1, rows, 4096, 8192, 0.0) for rows in (1, 64, 2048)]
    decodes = [DecodeKernel(32, 8, 128, 8, 2048, 0.0)]
    assert found.graph_all_reduce is not None
    assert true.graph_all_reduce is not None
    messages = [Message(8, 1 << power, 0.0) for power in (10, 20, 26)]
    for predicted, expected in (
        [fitting.products_seconds(each.gemm, sizes, true.multiprocessors) for each in (found, true)],
        [fitting.messages_seconds(each, messages) for each in (found.graph_all_reduce, true.graph_all_reduce)],
        [fitting.decodes_seconds(each.attention.of(KERNELS), decodes, true.multiprocessors) for each in (found, true)],
    ):
        assert predicted == pytest.approx(expected, rel=0.05)
