"""Measured servers become simulations of the clients that measured them."""

from __future__ import annotations

from pathlib import Path

from benchmarks import real_pipelines
from benchmarks.support.simulated import configure

HEAD = "model,dtype,gpu,backend,version,tp,pp,isl,osl,concurrency,ttft_ms,tpot_ms"
SERVERS = """
Qwen/Qwen3-32B,bf16,h100,vllm,0.12.0,8,1,1024,128,8,126.1,11.758
Qwen/Qwen3-32B,bf16,h100,sglang,0.5.1,8,1,1024,128,8,126.1,11.758
Qwen/Qwen3-32B,bf16,h100,vllm,0.12.0,2,1,4096,1024,128,58753,55.2
meta-llama/Llama-3.1-70B,fp8,h200,vllm,unknown,8,1,1024,1024,4,73,7.934
nvidia/Llama-3.1-8B-Instruct-FP8,fp8,h200,vllm,0.12.0,2,1,2000,100,96,75.72,9.45
"""


def test_servers_are_simulated_as_their_clients_loaded_them(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "silicon.csv").write_text(HEAD + SERVERS, encoding="utf-8")
    own, full, varied, repeated = real_pipelines.servers(tmp_path)
    assert [each.fitted for each in (own, full, varied, repeated)] == [True, False, True, False]
    assert [each.counts_first_tokens for each in (own, full, varied, repeated)] == [True, False, True, False]
    config = configure(own.keys)
    assert (config.engine, config.scheduler.max_batched_tokens) == ("vllm", 1024 + 1500 + 512)  # type: ignore[union-attr]
    assert configure(varied.keys).workload.range_ratio == 0.111  # type: ignore[union-attr]
    assert configure(repeated.keys).workload.distinct_prompts == 100
    ((_, error),) = real_pipelines.run([varied])
    assert abs(error["tpot"]) < 0.1, "Llama 3.1 70B in FP8 over eight H200s"
